"""What a power cut may leave, in cases written by hand."""

from random import Random

import pytest
from support.chaos.file_recorder import Call, Change
from support.chaos.kept_volume import Kept, KeptVolume


def call(changes=(), contents=None, folders=(), synced=0):
    return Call("call", 0, 0, [Change(*change) for change in changes], contents or {}, list(folders), synced)


def kept(tmp_path, calls, how, seed=0):
    volume = KeptVolume()
    for each in calls:
        volume.apply(each)
    root = tmp_path / f"{how.name}-{seed}"
    volume.write(root, how, Random(seed))
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


WRITTEN = [call([(1, "new", 0, 2)], {2: b""}), call(contents={2: b"content"})]
RENAMED = call([(1, "new", 2, 0), (1, "final", 0, 2)])


@pytest.mark.parametrize(
    ("how", "left"),
    [
        (Kept.EVERYTHING, {"final": b"content"}),
        (Kept.NOTHING, {}),
        (Kept.NAMES, {"final": bytes(7)}),
        (Kept.CONTENTS, {}),
    ],
)
def test_what_was_not_synced_is_open(tmp_path, how, left):
    assert kept(tmp_path, [*WRITTEN, RENAMED], how) == left


def test_what_was_synced_is_kept(tmp_path):
    calls = [*WRITTEN, call(synced=2), RENAMED, call(synced=1)]
    assert all(kept(tmp_path, calls, how) == {"final": b"content"} for how in Kept)


def test_a_rename_happens_wholly_or_not_and_not_before_what_came_before_it(tmp_path):
    lefts = [kept(tmp_path, [*WRITTEN, call(synced=2), RENAMED], Kept.ANYTHING, seed) for seed in range(30)]
    assert [left for left in lefts if left not in ({}, {"new": b"content"}, {"final": b"content"})] == []
    assert {tuple(left) for left in lefts} == {(), ("new",), ("final",)}


def test_what_is_appended_is_torn_by_blocks_and_what_was_synced_stays(tmp_path):
    calls = [*WRITTEN, call(synced=2), call(synced=1), call(contents={2: b"content" + b"x" * 2_000})]
    lefts = [kept(tmp_path, calls, Kept.ANYTHING, seed)["new"] for seed in range(50)]
    assert all(left.startswith(b"content") for left in lefts)
    assert any(b"\0x" in left for left in lefts), "a block is missing before one that is there"
    assert len({len(left) for left in lefts}) > 5


def test_links_share_what_was_kept_of_their_file(tmp_path):
    calls = [*WRITTEN, call([(1, "other", 0, 2)])]
    assert kept(tmp_path, calls, Kept.EVERYTHING) == {"new": b"content", "other": b"content"}


def test_a_folder_is_as_open_as_what_is_in_it(tmp_path):
    calls = [
        call([(1, "folder", 0, 2)], folders=[2]),
        call([(2, "file", 0, 3)], {3: b""}),
        call(synced=1),
        call([(2, "file", 3, 0)]),
    ]
    lefts = [kept(tmp_path, calls, Kept.ANYTHING, seed) for seed in range(20)]
    assert {len(left) for left in lefts} == {1, 2}

"""The checkpoint volume: names that cannot escape, directories that are never half-written."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import errors, layout
from paceline.layout import CheckpointPath, Volume
from paceline.types import CheckpointKind

RUN = f"run-{0:032x}"


@pytest.mark.parametrize("name", ["a", "step-10", "v1.2_final", "A" * 128])
def test_names_that_are_taken(name):
    assert layout.check_name(name) == name
    assert CheckpointPath.parse(f"paceline://{RUN}/state/{name}") == CheckpointPath(RUN, CheckpointKind.STATE, name)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "A" * 129, "a\n", "a\0", "ü"])
def test_names_that_are_refused(name):
    with pytest.raises(errors.InvalidName) as caught:
        layout.check_name(name)
    assert caught.value.field == "name"


@given(st.text(max_size=40))
def test_no_path_leads_out_of_the_volume(tail):
    try:
        path = CheckpointPath.parse(f"paceline://{RUN}/sampler/{tail}")
    except errors.InvalidPath:
        return
    root = Volume(layout.Path("/volume")).run(RUN)
    assert Volume(layout.Path("/volume")).checkpoint(path).parent == root / "sampler"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "x",
        f"paceline://{RUN}",
        f"paceline://{RUN}/weights/a",
        "paceline://../state/a",
        f"http://{RUN}/state/a",
        f"tinker://{RUN}/weights/a",
    ],
)
def test_what_is_no_checkpoint_path_is_refused(path):
    with pytest.raises(errors.InvalidPath, match="list_checkpoints returns such paths"):
        CheckpointPath.parse(path)


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    final = tmp_path / "made"
    with pytest.raises(ValueError, match="stop"), layout.new_directory(final) as staging:
        (staging / "file").write_text("half")
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []
    with layout.new_directory(final) as staging:
        (staging / "file").write_text("whole")
        assert not final.exists()
    assert (final / "file").read_text() == "whole"


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path):
    final = tmp_path / "made"
    for text in ("first", "second"):
        with layout.new_directory(final, overwrite=text == "second") as staging:
            (staging / "file").write_text(text)
    assert (final / "file").read_text() == "second"
    with pytest.raises(FileExistsError), layout.new_directory(final):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_sweep_finishes_what_a_crash_interrupted(tmp_path):
    (tmp_path / ".new-abc").mkdir()
    (tmp_path / ".old-123.kept").mkdir()
    (tmp_path / ".old-456.replaced").mkdir()
    (tmp_path / "replaced").mkdir()
    layout.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "replaced"]


def test_a_full_disk_is_its_own_error(tmp_path):
    with pytest.raises(errors.DiskFull), layout.new_directory(tmp_path / "made"):
        raise OSError(errno.ENOSPC, "no space")
    assert list(tmp_path.iterdir()) == []


def test_an_opened_directory_stays_the_same_when_another_takes_its_name(tmp_path):
    final = tmp_path / "made"
    with layout.new_directory(final) as staging:
        (staging / "file").write_text("first")
    with layout.opened(final) as opened:
        kept = (opened / "file").open()
        with layout.new_directory(final, overwrite=True) as staging:
            (staging / "file").write_text("second")
        assert kept.read() == "first"
        assert not (opened / "file").exists()
    kept.close()
    with layout.opened(final) as opened:
        assert (opened / "file").read_text() == "second"


def test_a_directory_between_two_renames_is_opened(tmp_path):
    for name in ("one.two", "two"):
        old = tmp_path / f".old-{'0' * 32}.{name}"
        old.mkdir()
        (old / "file").write_text(name)
    for name in ("one.two", "two"):
        with layout.opened(tmp_path / name) as opened:
            assert (opened / "file").read_text() == name
    with pytest.raises(FileNotFoundError), layout.opened(tmp_path / "none"):
        pass


def test_files_are_linked(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for directory in (source, target):
        directory.mkdir()
    (source / "file").write_text("text")
    layout.link_files(source, target)
    assert (source / "file").samefile(target / "file")


def test_versions_and_snapshots_are_folders_named_by_plain_numbers(tmp_path):
    for name in ("1", "20", "007", "2.damaged-1", "٣", ".new-4"):
        (tmp_path / name).mkdir()
    assert sorted(layout.numbered(tmp_path)) == [1, 20]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch):
    assert layout.numbered(tmp_path / "absent") == []
    (tmp_path / "1").mkdir()

    def exhausted(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "listdir", exhausted)
    for read in (layout.numbered, layout.entries, layout.find_quarantined, layout.sweep):
        with pytest.raises(OSError, match="Too many open files"):
            read(tmp_path)

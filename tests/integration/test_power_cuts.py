"""Whatever a power cut leaves, the trainer starts from it with everything that it acknowledged, intact."""

from random import Random
from shutil import rmtree

import pytest
import pytest_asyncio
from support.chaos.kept_volume import Kept
from support.chaos.power_cut_run import Cut, Item, PowerCuts, Script
from support.models.tiny_models import make_tiny_llama

from paceline.trainer.v1 import trainer_service_pb2 as pb

KINDS = [*Kept, *[Kept.ANYTHING] * 3]
"""What is kept in each cut."""

pytestmark = [pytest.mark.services, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cuts(tmp_path_factory):
    """A recording of a trainer's file operations, from which power cuts are made."""
    folder = tmp_path_factory.mktemp("cuts")
    cuts = PowerCuts(folder, make_tiny_llama(folder / "model"), rounds=3)
    try:
        await cuts.record()
        yield cuts
    finally:
        cuts.close()


async def test_nothing_acknowledged_is_lost_or_torn_by_power_cuts(cuts):
    names = {call.name for call in cuts.calls}
    assert {"write", "fsync", "fdatasync", "rename", "renameat2", "linkat", "unlinkat", "mkdir"} <= names
    found = [
        line
        for number, cut in enumerate(spread(KINDS, len(cuts.calls), seed=0))
        for line in await cuts.check(cut, to_the_end=number % 4 == 0)
    ]
    assert found == []


def spread(kinds, calls, seed):
    """Return a cut of each kind, in any order, each in another part of the recording."""
    random, parts = Random(seed), len(kinds)
    for part, kept in enumerate(random.sample(kinds, parts)):
        yield Cut(random.randint(part * calls // parts, (part + 1) * calls // parts), kept, random.randrange(16))


async def test_a_recording_is_all_that_was_written(cuts, tmp_path):
    volume = tmp_path / "again"
    cuts.leave(volume, Cut(len(cuts.calls), Kept.EVERYTHING, 0))
    assert _contents(volume) == _contents(cuts.directory / "recorded")


async def test_what_is_lost_or_answered_otherwise_is_found(cuts, monkeypatch):
    leave = cuts.leave

    def leave_damaged(volume, cut):
        leave(volume, cut)
        first, second, third = (volume / "runs" / script.run_id for script in cuts.scripts[:3])
        rmtree(second / "versions" / "1")
        (first / "versions" / "1").rename(second / "versions" / "1")
        (third / "deleted.json").rename(third / "run.json").write_bytes(b"unreadable")

    monkeypatch.setattr(cuts, "leave", leave_damaged)
    found = "\n".join(await cuts.check(Cut(len(cuts.calls), Kept.EVERYTHING, 0), to_the_end=False))
    assert "first: durable version 1 was acknowledged and is lost" in found
    assert "second: durable version 1 is not what was acknowledged" in found
    assert "third: GetRun answers RUN_STATE_LOST and not RUN_NOT_FOUND" in found


@pytest.mark.parametrize(
    ("request_of", "refusal", "line"),
    [
        (lambda _: pb.DeleteRunRequest(run_id="run-none"), "", "DeleteRun answers RUN_NOT_FOUND, not OK"),
        (lambda _: pb.CreateRunRequest(request_id="made"), "RANK_TOO_LARGE", "not RANK_TOO_LARGE"),
    ],
)
async def test_a_recording_must_be_what_its_script_intends(cuts, tmp_path, request_of, refusal, line):
    script = Script("other", [Item(request_of, refusal)])
    async with cuts.trainer(tmp_path, {}) as stub:
        with pytest.raises(AssertionError, match=line):
            await script.record(stub, 0, None)


def _contents(root):
    return {path.relative_to(root): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}

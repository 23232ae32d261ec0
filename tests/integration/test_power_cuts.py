"""Whatever a power cut leaves, the trainer starts from it with everything that it acknowledged, intact."""

from random import Random

import pytest
import pytest_asyncio
from support.chaos.kept_volume import Kept
from support.chaos.power_cut_run import Cut, PowerCuts
from support.models.tiny_models import make_tiny_llama

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
    assert {"write", "fsync", "fdatasync", "rename", "renameat2", "link", "unlinkat", "mkdir"} <= names
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


def _contents(root):
    return {path.relative_to(root): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}

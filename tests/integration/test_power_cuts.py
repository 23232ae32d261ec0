"""Whatever a power cut leaves, the trainer starts on it, whole, with all that it acknowledged."""

import pytest
from kept_volume import Kept
from power_cut_run import Cut, PowerCuts
from tiny_models import make_tiny_llama

CUTS = 24

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("chaos")]


@pytest.fixture
def cuts(tmp_path):
    cuts = PowerCuts(tmp_path, make_tiny_llama(tmp_path / "model"), rounds=3)
    yield cuts
    cuts.close()


async def test_nothing_acknowledged_is_lost_or_torn_by_power_cuts(cuts):
    await cuts.record()
    names = {call.name for call in cuts.calls}
    assert {"write", "fsync", "fdatasync", "rename", "renameat2", "link", "unlinkat", "mkdir"} <= names
    found = [
        line
        for number, cut in enumerate(cuts.cuts(CUTS, seed=0))
        for line in await cuts.check(cut, to_the_end=number % 8 == 0)
    ]
    assert found == []


async def test_a_recording_is_all_that_was_written(cuts, tmp_path):
    await cuts.record()
    volume = tmp_path / "again"
    cuts.leave(volume, Cut(len(cuts.calls), Kept.EVERYTHING, 0))
    assert _contents(volume) == _contents(tmp_path / "recorded")


def _contents(root):
    return {path.relative_to(root): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}

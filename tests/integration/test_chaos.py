"""No acknowledged command is lost or applied twice, whatever process dies and whatever the network does."""

import asyncio
import os
import signal

import pytest
from support.chaos.chaos_clients import Client
from support.chaos.chaos_run import Chaos
from support.models.tiny_models import make_tiny_llama

from paceline import errors
from paceline.layout import numbered
from paceline.rpc.channel import open_channel
from trainer_service.journal.history import segments

KILLS = 8
pytestmark = pytest.mark.services


@pytest.fixture
def chaos(tmp_path):
    # Snapshot after every few commands, so that kills hit snapshots too.
    chaos = Chaos(tmp_path, make_tiny_llama(tmp_path / "model"), seed=0, settings={"SNAPSHOT_COMMANDS": "7"})
    yield chaos
    chaos.close()


async def test_runs_that_are_killed_over_and_over_end_byte_identical_to_runs_that_are_not(chaos):
    outcome = await chaos.run(KILLS)
    assert outcome.kills.total() >= KILLS
    assert {"sampler", "gateway"} < {name.partition(" ")[0] for name in outcome.kills}
    assert outcome.samples > 0
    assert outcome.differences == []
    runs = [path.parent for path in chaos.volume.glob("runs/*/run.json")]  # skips what a killed CreateRun left
    assert runs
    kept = [len(numbered(run / "snapshots")) for run in runs]
    assert {2} <= set(kept) <= {1, 2}
    for run, snapshots in zip(runs, kept, strict=True):
        oldest, *_ = segments(run / "journal")
        assert snapshots == 1 or oldest.base > 1, "what two snapshots make superfluous is removed"


async def test_a_command_that_the_engine_dies_of_is_refused_and_the_run_goes_on(chaos):
    chaos.environment["PACELINE_TRAINER_MAX_ATTEMPTS"] = "2"
    service = chaos.start("engine_OptimStep:1+")
    chaos.services.gateway.start()
    async with open_channel(f"127.0.0.1:{chaos.services.gateway.port}") as channel:
        client = Client(channel, seed=0, token="pl-red")
        await client.create()
        await client.forward_backward()
        with pytest.raises(errors.PoisonedCommand) as caught:
            await client.optim_step()
        assert caught.value.metadata == {"attempts": "2"}
        await client.forward_backward()
        service.kill()
        assert service.wait(10)
        service = chaos.start("")
        client.seq_id -= 2
        with pytest.raises(errors.PoisonedCommand):
            await client.optim_step()
        client.seq_id += 1
        assert (await client.optim_step()).tokens == 12
    os.kill(service.pid, signal.SIGKILL)
    assert await asyncio.to_thread(service.wait, 10)

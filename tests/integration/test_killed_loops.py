"""The example of reinforcement learning goes on after a SIGKILL anywhere, and ends with the weights of a calm run."""

import asyncio
import json
import os
import re
import signal
import sys

import pytest
from support.faults.killing_network import DISCARD, KillingNetwork, Moment, Place
from support.learnable_loop import copy_learnable_loop
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.cluster import Cluster, wait_for
from support.stacks.warm_processes import behind

from paceline import CheckpointKind

STEPS = 7
PLACES = [
    Place("CreateRun", Moment.LOST),
    Place("CreateRun", Moment.ANSWERED),
    Place("AttachRun", Moment.ANSWERED),
    Place("SaveCheckpoint", Moment.ON_ITS_WAY),
    Place("SaveCheckpoint", Moment.ANSWERED),
    Place("PublishWeights", Moment.ON_ITS_WAY),
    Place("PublishWeights", Moment.ANSWERED),
    Place("Sample", Moment.ON_ITS_WAY),
    Place("Sample", Moment.ANSWERED),
    Place("ForwardBackward", Moment.LOST),
    Place("ForwardBackward", Moment.ON_ITS_WAY),
    Place("ForwardBackward", Moment.ANSWERED),
    Place("OptimStep", Moment.LOST),
    Place(DISCARD, Moment.LOST),
    Place(DISCARD, Moment.ANSWERED),
    Place("OptimStep", Moment.ON_ITS_WAY),
    Place("OptimStep", Moment.ANSWERED),
    Place("PublishWeights", Moment.LOST, 2),
    Place("OptimStep", Moment.ANSWERED, 2),
    Place("SaveCheckpoint", Moment.ANSWERED),
]
"""In the order of the loop. The discards come after a step that was lost; the last SaveCheckpoint is the final one."""

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    state = tmp_path_factory.mktemp("killed_loops")
    cluster = Cluster.make(state, make_tiny_llama(state / "model"))
    with cluster.running():
        yield cluster


@pytest.fixture
def loop(tmp_path):
    return copy_learnable_loop(tmp_path)


async def start(loop, address, api_key, name):
    # One prompt at a time: the sums of prompts that share a batch may differ in their last bits.
    arguments = [f"--{key}={value}" for key, value in {"steps": STEPS, "prompts": 1, "samples": 4, "rank": 4}.items()]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(loop),
        *arguments,
        "--learning-rate=1e-2",
        f"--name={name}",
        f"--out={loop.parent}",
        env={**os.environ, "PACELINE_ADDRESS": address, "PACELINE_API_KEY": api_key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def end(process):
    """Wait for its end; return its exit status and what it wrote."""
    async with asyncio.timeout(PATIENCE):
        written, _ = await process.communicate()
    return process.returncode, written.decode()


async def test_a_loop_that_is_killed_at_20_places_ends_as_if_it_had_never_been(forked_engines, cluster, service, loop):
    code, written = await end(await start(loop, cluster.address, cluster.api_key, "calm"))
    assert code == 0, written
    assert f"step {STEPS} of {STEPS}" in written
    assert "reward curve" in written
    assert len(re.findall(r"'Country: .*' \(\d of 4 right\) before, .* \(\d of 4 right\) after", written)) == 3
    (calm,) = finals(service)
    undisturbed = measured(loop)
    async with KillingNetwork(int(cluster.address.rpartition(":")[2])).running() as network:
        address = f"127.0.0.1:{network.port}"
        for place in PLACES:
            process = await start(loop, address, cluster.api_key, "disturbed")
            network.expect(place, lambda pid=process.pid: os.kill(behind(pid), signal.SIGKILL))
            code, written = await end(process)
            assert network.has_killed, f"{place}: {written}"
            assert code == -signal.SIGKILL
        code, written = await end(await start(loop, address, cluster.api_key, "disturbed"))
        assert code == 0, written
    disturbed, _ = finals(service)
    assert (disturbed.step, disturbed.blake3) == (calm.step, calm.blake3)
    assert calm.step == STEPS
    assert measured(loop) == undisturbed
    assert [step for step, *_ in undisturbed] == list(range(1, STEPS + 1))
    assert not service.list_runs()
    assert not service.list_checkpoints(kind=CheckpointKind.STATE)
    assert not list(loop.parent.glob("rewards-*"))


def measured(loop):
    """Take the loop's file away; return the number, the reward and the tokens of each step that it shows."""
    path = loop.parent / "rewards.json"
    steps = json.loads(path.read_text())["steps"]
    path.unlink()
    return [(step["step"], step["reward"], step["tokens"]) for step in steps]


def finals(service):
    """Return the final weights of all runs, newest first."""
    return [one for one in service.list_checkpoints(kind=CheckpointKind.SAMPLER) if one.name == "final"]


async def test_a_loop_whose_run_another_client_trains_ends_with_a_sentence(forked_engines, cluster, service, loop):
    process = await start(loop, cluster.address, cluster.api_key, "superseded")
    await asyncio.to_thread(wait_for, lambda: any(run.step for run in service.list_runs()))
    (run,) = await service.list_runs_async()
    await service.get_training_client_async(run.run_id)
    code, written = await end(process)
    assert code == 1
    assert "another script has attached to the run" in written
    assert "Traceback" not in written
    await service.delete_run_async(run.run_id, delete_checkpoints=True)

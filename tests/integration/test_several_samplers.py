"""Samplers that follow one trainer: one starts late, one is killed and restarted, one is cut off for a while."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from support.cut_proxy import CutProxy
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster
from support.stacks.sampler_stack import Client, sampling, until, version_ref
from support.stacks.weight_stack import BASE, CREDENTIAL

import paceline
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import PEER_TENANT

pytestmark = pytest.mark.services


@pytest.fixture
def cluster(request, tmp_path):
    (tmp_path / "credential").write_text(CREDENTIAL)
    cluster = Cluster.make(
        tmp_path,
        make_tiny_llama(tmp_path / BASE),
        bridge=request.param,
        PACELINE_SAMPLER_SAMPLER_ID="restarted",
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def training(cluster):
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        yield service.create_lora_training_client(rank=4, seed=1)


def port_of(cluster, service):
    return int(cluster.services[service].plan.environment[f"PACELINE_{service.upper()}_LISTEN"].rpartition(":")[2])


def follower(cluster, trainer_port, name, **settings):
    """Run another sampler beside the cluster's own, in this process."""
    sampler = cluster.sampler.plan.environment
    folder = cluster.state / name
    return sampling(
        cluster.state / BASE,
        trainer_port,
        folder,
        bridge=sampler["PACELINE_SAMPLER_BRIDGE"],
        checkpoint_dir=cluster.state / "checkpoints",
        sampler_id=name,
        **settings,
    )


async def publish(training, wait_for="none"):
    return await asyncio.to_thread(training.publish_weights(wait_for=wait_for).result)


async def acknowledged(training, samplers):
    """Publish; return the result if these samplers acknowledged it, or None: a sampler may serve before watching."""
    published = await publish(training, wait_for="all")
    return published if {ack.sampler_id for ack in published.acknowledgements} == samplers else None


async def ends_on(client, version):
    """Wait until the sampler has loaded a version by itself."""
    await until(lambda: _is_loaded(client, version))


@pytest.mark.parametrize(
    ("cluster", "engine"),
    [
        # Only one of all these samplers runs vLLM: hf starts faster.
        pytest.param("stream", {"engine": "vllm", "enforce_eager": True}, id="stream"),
        pytest.param("volume", {}, id="volume"),
    ],
    indirect=["cluster"],
)
async def test_each_ends_on_the_newest_version_by_itself(cluster, engine, training, vllm_here):
    async with AsyncExitStack() as stack:
        trainer_port = port_of(cluster, "trainer")
        network = await stack.enter_async_context(CutProxy(trainer_port).running())
        cut_off = await stack.enter_async_context(follower(cluster, network.port, "cut off"))
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port_of(cluster, 'sampler')}"))
        restarted = Client(channel, None, cluster.state, None, None, "")
        first = await until(lambda: acknowledged(training, {"cut off", "restarted"}))

        network.cut()
        await asyncio.to_thread(cluster.sampler.kill)
        for _ in range(2):
            newest = await publish(training)
        late = await stack.enter_async_context(follower(cluster, trainer_port, "late", **engine))
        await ends_on(late, newest.model.version)
        await asyncio.to_thread(cluster.sampler.start)
        await ends_on(restarted, newest.model.version)

        mine = version_ref(training.run_id)
        assert (await cut_off.be(PEER_TENANT).sample(mine)).model.version == first.model.version
        network.heal()
        await ends_on(cut_off, newest.model.version)
        assert network.swallowed
        for client in (cut_off, restarted, late):
            served = (await client.be(PEER_TENANT).sample(mine)).model
            assert (served.version, served.blake3) == (newest.model.version, newest.model.blake3)
        last = await publish(training, wait_for="all")
        assert {ack.sampler_id for ack in last.acknowledgements} == {"cut off", "restarted", "late"}


async def _is_loaded(client, version):
    return version in await client.loaded()

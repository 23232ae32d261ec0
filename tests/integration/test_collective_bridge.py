"""Versions broadcast from a trainer to samplers over a process group."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.descendants import descendants
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for
from support.stacks.sampler_stack import sampling, until, version_ref
from support.stacks.warm_processes import behind
from support.stacks.weight_stack import BASE, CREDENTIAL, Trainer, make_version

import paceline
from paceline.layout import WEIGHTS_FILE, Volume, new_run_id
from paceline.rpc.interceptors import CredentialInterceptor, ErrorInterceptor
from paceline.types import ModelInfo
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from paceline.weights.v1.weight_service_pb2_grpc import add_WeightServiceServicer_to_server
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.options import EngineOptions
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.publish.agreements import Agreements
from trainer_service.publish.process_group import BroadcastGroup, GroupOptions
from trainer_service.publish.watch_hub import AckPolicy, WatchHub
from trainer_service.rpc.weight_servicer import WeightServicer
from trainer_service.runs.registry import RunRegistry

pytest_plugins = ["support.stacks.sampler_fixtures"]
pytestmark = pytest.mark.usefixtures("forked_engines")

RUN = new_run_id()
MEMBER = "paceline.collective.member"
PROMPT, COMPLETION = list(b"Country: Peru\nCapital:"), list(b" Lima")


class GroupTrainer(WeightServicer):
    """The trainer's real weight service, watch hub and process group, with versions from a volume."""

    def __init__(self, volume: Volume, seconds: float = 20.0) -> None:
        self.hub = WatchHub()
        self.group = BroadcastGroup(GroupOptions("127.0.0.1:0", "gloo", seconds), self.hub)
        self.versions = Trainer(volume)
        engine = EngineProcess(EngineOptions("", BASE))
        agreements = Agreements(engine, lambda run, version: volume.version(run.run_id, version), CollectorRegistry())
        model, runs = ModelInfo(BASE, 512, 260, "float32", 8, 2), RunRegistry(volume, None, DiskGuard(volume=volume))
        super().__init__(self.hub, self.group, None, runs, None, lambda: model, agreements)

    async def FetchVersion(self, request, context):  # noqa: N802
        async for part in self.versions.FetchVersion(request, context):
            yield part

    async def publish(self, model, version, *, damage=False):
        """Announce and broadcast a version as the publisher does; return the acknowledgements of all samplers."""
        volume = self.versions.volume
        manifest = make_version(volume, model, RUN, version)
        directory = volume.version(RUN, version)
        if damage:
            directory = shutil.copytree(directory, volume.root / "damaged")
            whole = (directory / WEIGHTS_FILE).read_bytes()
            (directory / WEIGHTS_FILE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        generation = self.group.send(manifest, directory)
        announcement = weights_pb.Announcement(manifest=manifest, broadcast_generation=generation)
        expected = self.hub.announce(announcement)
        return await self.hub.wait((RUN, version), AckPolicy.ALL, expected, 60.0)


@asynccontextmanager
async def serving(trainer):
    server = grpc.aio.server(interceptors=[ErrorInterceptor(), CredentialInterceptor(CREDENTIAL)])
    add_WeightServiceServicer_to_server(trainer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = asyncio.create_task(trainer.group.run())
    try:
        yield port
    finally:
        await server.stop(None)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def following(stack, model, port, folder, name):
    """Run a sampler in a trainer's process group."""
    own = folder / name
    own.mkdir()
    async with sampling(model, port, own, bridge="collective", sampler_id=name) as client:
        yield client


@pytest.fixture
async def stack():
    async with AsyncExitStack() as stack:
        yield stack


async def test_versions_are_broadcast_verified_acknowledged_and_what_the_group_loses_comes_by_stream(
    model, volume, stack, tmp_path
):
    trainer = GroupTrainer(volume, seconds=3.0)
    port = await stack.enter_async_context(serving(trainer))
    first = await stack.enter_async_context(following(stack, model, port, tmp_path, "first"))
    second_stack = await stack.enter_async_context(AsyncExitStack())
    await second_stack.enter_async_context(following(stack, model, port, tmp_path, "second"))
    await until(lambda: trainer.group.count() == 2)

    acknowledged = await trainer.publish(model, 1)
    assert {ack.sampler_id for ack in acknowledged} == {"first", "second"}
    assert trainer.versions.fetched == [], "the bytes came over the group"
    assert (await first.sample(version_ref(RUN, 1))).model.blake3 == acknowledged[0].blake3

    await trainer.publish(model, 2, damage=True)
    assert trainer.versions.fetched == ["2", "2"], "damaged bytes are not loaded; whole ones are fetched"
    assert trainer.group.count() == 2

    os.kill(behind(descendants(MEMBER)[-1].pid), signal.SIGSTOP)
    acknowledged = await trainer.publish(model, 3)
    assert {ack.sampler_id for ack in acknowledged} == {"first", "second"}, "within the deadline"
    assert set(trainer.versions.fetched[2:]) == {"3"}, "who did not get it over the group fetches it"

    await second_stack.aclose()
    late = await stack.enter_async_context(following(stack, model, port, tmp_path, "late"))
    await until(late.loaded)
    assert list(await late.loaded()) == [3], "who comes late gets the newest version at once"
    await until(lambda: trainer.group.count() == 2)
    before = list(trainer.versions.fetched)
    acknowledged = await trainer.publish(model, 4)
    assert {ack.sampler_id for ack in acknowledged} == {"first", "late"}
    assert trainer.versions.fetched == before, "the bytes came over the new group"
    await until(lambda: len(first.staged()) == 2)


async def test_without_members_there_is_no_process(model, volume, stack, tmp_path):
    trainer = GroupTrainer(volume)
    port = await stack.enter_async_context(serving(trainer))
    await stack.enter_async_context(sampling(model, port, tmp_path))
    assert [ack.sampler_id for ack in await trainer.publish(model, 1)] == ["domestique"]
    assert not descendants(MEMBER)


@pytest.mark.services
def test_vllm_serves_what_the_trainer_broadcasts(tmp_path):
    cluster = Cluster.make(tmp_path, make_tiny_llama(tmp_path / "model"), engine="vllm", bridge="collective")
    try:
        cluster.start()
        wait_for(lambda: "group formed" in cluster.trainer.tail(), 200, cluster.trainer.tail)
        with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
            training = service.create_lora_training_client(rank=8)
            datum = paceline.Datum.from_completion(PROMPT, COMPLETION)
            for _ in range(2):
                training.forward_backward([datum])
                training.optim_step(paceline.AdamParams(learning_rate=1e-2))
                published = training.publish_weights().result()
            sampling = service.create_sampling_client(run_id=published.model.run_id, version=2)
            reached = sampling.compute_logprobs(PROMPT + COMPLETION).result()
            trained = training.forward([datum]).result().loss_fn_outputs[0]["logprobs"]
        assert reached.model == published.model
        last = slice(-len(COMPLETION), None)
        np.testing.assert_allclose(reached.logprobs[last], trained[last], atol=1e-4)
        assert "FetchVersion" not in cluster.trainer.log.read_text(), "the bytes came over the group"
    finally:
        cluster.stop()

"""The sampler's watch on the trainer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.types import ModelInfo
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceServicer, add_WeightServiceServicer_to_server
from sampler_service.metrics import SamplerMetrics
from sampler_service.transports.trainer_link import TrainerLink
from sampler_service.watcher import VersionWatcher

MODEL = ModelInfo("tiny", 128, 259, "float32", 8, 2)


class _Ending(WeightServiceServicer):
    """Ends each watch when it has heard from the sampler."""

    def __init__(self) -> None:
        self.watches = 0

    async def WatchVersions(self, request_iterator, context):  # noqa: N802
        await anext(request_iterator)
        self.watches += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
        yield


class _LosingWatch:
    """A watch that loses the first cancellation, as with grpc.aio where the stream fails or ends at that moment."""

    def __init__(self, failure: grpc.aio.AioRpcError | None) -> None:
        self._failure = failure
        self._has_lost = False

    async def __aiter__(self):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if self._has_lost:
                raise
            self._has_lost = True
        if self._failure is not None:
            raise self._failure
        for nothing in ():
            yield nothing

    def cancel(self):
        pass


def _watcher(link):
    registry = SimpleNamespace(listeners=SimpleNamespace(loaded=[], released=[]), held=list)
    metrics = SamplerMetrics(CollectorRegistry())
    parts = (link, registry, SimpleNamespace(), "sampler", MODEL, SimpleNamespace(), metrics)
    return VersionWatcher(*parts, serves="adapters", needs_volume=False, offers=None, group=None)


FAILURE = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.mark.parametrize("failure", [FAILURE, None], ids=["fails", "ends"])
async def test_a_watcher_ends_although_its_watch_fails_or_ends_at_the_moment_of_the_cancellation(failure):
    watch = _LosingWatch(failure)
    running = asyncio.create_task(_watcher(SimpleNamespace(watch=lambda _: watch)).run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()


async def test_a_watch_that_ended_leaves_no_task_behind():
    servicer, server = _Ending(), grpc.aio.server()
    add_WeightServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watcher = _watcher(TrainerLink(channel, "", 5.0))
        for _ in range(3):
            assert await watcher._watch() == "UNAVAILABLE"
        readers = [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task)]
        _, left = await asyncio.wait(readers, timeout=5) if readers else ((), ())
    await server.stop(0)
    assert servicer.watches == 3
    assert not left

"""Pushes whose sender disconnects leave no orphaned files or adapters."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack

import google_crc32c
import pytest
from support.patience import PATIENCE
from support.stacks.sampler_stack import PROMPT, sampling, until, version_ref
from support.stacks.weight_stack import BASE, chunks_of, make_version

from paceline import errors
from paceline.layout import WEIGHTS_FILE, Volume, new_run_id
from paceline.rpc.identity import PEER_TENANT
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from sampler_service.engine.hf.engine import HfEngine
from sampler_service.engine.options import EngineOptions

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


class GatedEngine(HfEngine):
    """An engine that adds adapters only once the gate is open."""

    def __init__(self, options):
        super().__init__(options)
        self.gate, self.entered, self.adapters = asyncio.Event(), asyncio.Event(), []

    async def add_adapter(self, adapter):
        self.adapters.append(adapter)
        self.entered.set()
        await self.gate.wait()
        return await super().add_adapter(adapter)


@pytest.fixture
def parts(model, tmp_path):
    """The messages of one push."""
    outside = Volume(tmp_path / "outside")
    manifest = make_version(outside, model, RUN, 7)
    chunks = chunks_of(outside.version(RUN, 7) / WEIGHTS_FILE)
    return [
        pb.UpdateWeightsRequest(manifest=manifest),
        *(pb.UpdateWeightsRequest(chunk=piece) for chunk in chunks for piece in _pieces(chunk)),
        pb.UpdateWeightsRequest(commit=pb.Commit(blake3=manifest.model.blake3)),
    ]


def _pieces(chunk, size=4096):
    for start in range(0, len(chunk.data), size):
        data = chunk.data[start : start + size]
        yield weights_pb.Chunk(offset=chunk.offset + start, data=data, crc32c=google_crc32c.value(data))


async def test_a_sender_that_leaves_before_the_end_leaves_no_files(client, parts):
    for count in range(len(parts)):
        service = client.be(PEER_TENANT)
        call = service.stub.UpdateWeights(metadata=service.metadata, timeout=PATIENCE)
        for part in parts[:count]:
            await call.write(part)
        call.cancel()
    await until(lambda: not client.staged())
    assert not await client.loaded()


async def test_what_was_sent_whole_is_loaded_though_its_sender_leaves(model, port, tmp_path, parts):
    engine = GatedEngine(EngineOptions(model, BASE, "float32", max_lora_rank=8))
    async with sampling(model, port, tmp_path, engine) as client, AsyncExitStack() as stack:
        stack.callback(engine.gate.set)  # a sampler stops only after its loads have finished
        service = client.be(PEER_TENANT)
        call = service.stub.UpdateWeights(iter(parts), metadata=service.metadata, timeout=PATIENCE)
        await until(lambda: engine.entered.is_set() or call.done())
        assert call.cancel(), call
        await asyncio.gather(call, return_exceptions=True)
        engine.gate.set()
        loaded = await until(client.loaded)
        assert list(loaded) == [7]
        assert len(client.staged()) == 1
        await service.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(RUN, 7)))
        await until(lambda: not client.staged())
        with pytest.raises(errors.VersionNotFound):
            await engine.compute_logprobs(PROMPT, engine.adapters[0], "")


async def test_what_a_sampler_left_that_died_while_it_started_is_removed(model, port, tmp_path):
    old, new = (tmp_path / "staging" / f".paceline-sampler-{name}" for name in ("old", "new"))
    for directory in (old, new):
        directory.mkdir(parents=True)
        (directory / "lock").touch()
    os.utime(old, (time.time() - 3600,) * 2)
    async with sampling(model, port, tmp_path):
        assert not old.exists()
        assert new.exists()

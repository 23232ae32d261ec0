"""Callers that leave early, with each engine behind the service: their requests leave nothing in the engine."""

from __future__ import annotations

import pytest
from support.stacks.sampler_contract import cache_is_free
from support.stacks.sampler_stack import base_ref, sampling, stream_request, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

NO_TRAINER = 1
"""A port on which nothing listens."""


class Running:
    """An engine that outlives the service."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@pytest.mark.parametrize("how", ["cancel", "deadline", "hang up"])
async def test_a_call_that_ends_early_leaves_nothing_in_the_engine(engine, model_path, tmp_path, how):
    async with sampling(model_path, NO_TRAINER, tmp_path, Running(engine)) as client:
        request = stream_request(base_ref(), num_samples=64, max_tokens=100)
        timeout = 1.0 if how == "deadline" else None
        stream = client.stub.SampleStream(request, metadata=client.metadata, timeout=timeout)
        await until(engine.num_running)
        if how != "deadline":  # the deadline may pass before anything is read
            await stream.read()
        if how == "cancel":
            stream.cancel()
        elif how == "hang up":
            del stream
        await until(lambda: not engine.num_running())
        assert await cache_is_free(engine)

"""What a request does before it takes a place in the engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.patience import PATIENCE

from paceline.errors import InvalidArgument
from paceline.types import ModelInfo, ModelRef, SamplingParams, ServedModel, StopReason
from sampler_service.engine.protocol import TokenDelta
from sampler_service.metrics import SamplerMetrics
from sampler_service.sampling import Sampler
from sampler_service.scheduling.admission import Admission, ResourceLimits
from sampler_service.scheduling.tenant_queue import TenantQueue
from sampler_service.stores.base import Lease
from sampler_service.validation import RequestLimits, SampleRequest

MODEL = ModelInfo("tiny", max_context_length=32, vocab_size=100, dtype="float32", max_lora_rank=8, num_layers=2)


class Engine:
    """An engine that checks one constraint at a time, for as long as `is_checked` is not set."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.is_checking, self.is_checked = asyncio.Event(), asyncio.Event()

    def num_running(self) -> int:
        return 0

    async def check_constraint(self, params, turn):
        if params.regex:
            async with turn():
                self.checked.append(params.regex)
                self.is_checking.set()
                await self.is_checked.wait()
                raise InvalidArgument("cannot be enforced", field="params.regex")

    async def generate(self, request):
        request.delivery.completed(1)
        yield TokenDelta(0, [1], [-1.0], StopReason.LENGTH)


class Weights:
    @asynccontextmanager
    async def lease(self, ref, tenant):
        yield Lease(ServedModel("tiny"))


@pytest.fixture
async def engine():
    return Engine()


@pytest.fixture
async def sampler(engine):
    limits, metrics = RequestLimits(MODEL, 4, 5, 100), SamplerMetrics(CollectorRegistry())
    admission = Admission(ResourceLimits(100), ResourceLimits(10_000))
    return Sampler(
        engine, Weights(), limits, admission, TenantQueue(1), metrics, lambda ref, tenant: None, lambda tenant: 1
    )


def ask(**params):
    return SampleRequest(ModelRef(), np.arange(8, dtype=np.int32), SamplingParams(max_tokens=1, **params))


async def test_a_constraint_that_is_checked_holds_no_place_that_another_request_needs(sampler, engine):
    slow = asyncio.create_task(sampler.sample(ask(regex="a"), "anquetil"))
    await asyncio.wait_for(engine.is_checking.wait(), PATIENCE)
    result = await asyncio.wait_for(sampler.sample(ask(), "bartali"), PATIENCE)
    assert result.sequences[0].stop_reason is StopReason.LENGTH
    engine.is_checked.set()
    with pytest.raises(InvalidArgument):
        await slow


async def test_tenants_take_turns_to_have_constraints_checked(sampler, engine):
    many = [asyncio.create_task(sampler.sample(ask(regex=letter), "anquetil")) for letter in "abcd"]
    await asyncio.wait_for(engine.is_checking.wait(), PATIENCE)
    one = asyncio.create_task(sampler.sample(ask(regex="z"), "bartali"))
    await asyncio.sleep(0)
    engine.is_checked.set()
    await asyncio.gather(*many, one, return_exceptions=True)
    assert engine.checked.index("z") <= 2

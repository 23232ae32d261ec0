"""What a sampling client is told of weights that are gone, and of fields without effect; how many samples are drawn."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from support.patience import PATIENCE
from support.stacks.sampler_stack import until

from gateway.http.tinker.futures import PROTOBUF, Futures
from gateway.http.tinker.names import Aliases
from gateway.http.tinker.sampling import Asample, Params, Prompt, Sampling
from gateway.http.tinker.store import Sampler, Store
from paceline import errors
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.types import SampleResult, ServedModel


class Forgetful:
    """Services that keep no version."""

    async def sample(self, tenant, model, *_, **__):
        raise errors.VersionNotFound("no such version, or no longer kept", field="model.version.version")


class Slow:
    """Services that draw samples until they may end."""

    def __init__(self):
        self.may_end = asyncio.Event()
        self.drawing, self.most = Counter(), Counter()

    async def sample(self, tenant, *_, **__):
        self.drawing[tenant] += 1
        self.most[tenant] = max(self.most[tenant], self.drawing[tenant])
        await self.may_end.wait()
        self.drawing[tenant] -= 1
        return SampleResult([], ServedModel("base"))


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "tinker.sqlite")
    yield store
    store.close()


@pytest.fixture
async def futures(store):
    futures = Futures(store, WaitingBytes())
    yield futures
    await futures.close()


async def test_a_number_of_log_probabilities_that_are_not_asked_for_is_refused(store, futures):
    sampling = Sampling(Forgetful(), store, Aliases(()), futures, b"secret", 2)
    prompt = Prompt(chunks=[{"type": "encoded_text", "tokens": [1, 2]}])
    request = Asample(sampling_session_id="s:sample:0", seq_id=0, prompt=prompt, prompt_logprobs_last_n=1)
    await futures.post(sampling.sample, "s:sample:0:0", "tenant", "s", request)
    told = json.loads((await futures.result("tenant", "s:sample:0:0", PATIENCE)).body)
    assert "prompt_logprobs_last_n: has no effect without prompt_logprobs" in told["error"]


def test_true_is_no_token_that_stops():
    with pytest.raises(ValueError, match="valid integer"):
        Params(stop=[True])


async def test_a_snapshot_that_is_gone_is_named_with_what_keeps_weights(store, futures):
    sampling = Sampling(Forgetful(), store, Aliases(()), futures, b"secret", 2)
    await store.add_sampler(Sampler("s:sample:0", "tenant", "s", "base", run_id="run-1", version=3))
    prompt = Prompt(chunks=[{"type": "encoded_text", "tokens": [1, 2]}])
    request = Asample(sampling_session_id="s:sample:0", seq_id=0, prompt=prompt)
    await futures.post(sampling.sample, "s:sample:0:0", "tenant", "s", request)
    told = json.loads((await futures.result("tenant", "s:sample:0:0", PATIENCE)).body)
    assert told["category"] == "user"
    assert "VERSION_NOT_FOUND" in told["error"]
    assert "version 3 of run-1" in told["error"]
    assert "save_weights_for_sampler(name)" in told["error"]


async def test_a_tenants_samples_leave_places_for_its_other_calls_and_take_none_of_others(store, futures):
    slow, posted = Slow(), [("team", number) for number in range(6)] + [("other", 6)]
    sampling = Sampling(slow, store, Aliases(()), futures, b"secret", 2)
    prompt = Prompt(chunks=[{"type": "encoded_text", "tokens": [1, 2]}])
    for tenant in ("team", "other"):
        await store.add_sampler(Sampler(f"{tenant}:sample:0", tenant, tenant, "base"))
    for tenant, number in posted:
        request = Asample(sampling_session_id=f"{tenant}:sample:0", seq_id=number, prompt=prompt)
        await futures.post(sampling.sample, f"{tenant}:sample:0:{number}", tenant, tenant, request)
    await until(lambda: slow.drawing == {"team": 2, "other": 1})
    slow.may_end.set()
    for tenant, number in posted:
        result = await futures.result(tenant, f"{tenant}:sample:0:{number}", PATIENCE)
        assert result.media == PROTOBUF
    assert slow.most == {"team": 2, "other": 1}

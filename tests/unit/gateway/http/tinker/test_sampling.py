"""What a sampling client is told of weights that are gone, and of fields without effect."""

from __future__ import annotations

import json

import pytest
from support.patience import PATIENCE

from gateway.http.tinker.futures import Futures
from gateway.http.tinker.names import Aliases
from gateway.http.tinker.sampling import Asample, Params, Prompt, Sampling
from gateway.http.tinker.store import Sampler, Store
from paceline import errors
from paceline.waiting_bytes import WaitingBytes


class Forgetful:
    """Services that keep no version."""

    async def sample(self, tenant, model, *_, **__):
        raise errors.VersionNotFound("no such version, or no longer kept", field="model.version.version")


@pytest.fixture
async def futures(tmp_path):
    store = Store(tmp_path / "tinker.sqlite")
    futures = Futures(store, WaitingBytes())
    yield futures
    await futures.close()
    store.close()


async def test_a_number_of_log_probabilities_that_are_not_asked_for_is_refused(futures):
    sampling = Sampling(Forgetful(), futures._store, Aliases(()), futures, b"secret")
    prompt = Prompt(chunks=[{"type": "encoded_text", "tokens": [1, 2]}])
    request = Asample(sampling_session_id="s:sample:0", seq_id=0, prompt=prompt, prompt_logprobs_last_n=1)
    await futures.post(sampling.sample, "s:sample:0:0", "tenant", "s", request)
    told = json.loads((await futures.result("tenant", "s:sample:0:0", PATIENCE)).body)
    assert "prompt_logprobs_last_n: has no effect without prompt_logprobs" in told["error"]


def test_true_is_no_token_that_stops():
    with pytest.raises(ValueError, match="valid integer"):
        Params(stop=[True])


async def test_a_snapshot_that_is_gone_is_named_with_what_keeps_weights(futures):
    store = futures._store
    sampling = Sampling(Forgetful(), store, Aliases(()), futures, b"secret")
    await store.add_sampler(Sampler("s:sample:0", "tenant", "s", "base", run_id="run-1", version=3))
    prompt = Prompt(chunks=[{"type": "encoded_text", "tokens": [1, 2]}])
    request = Asample(sampling_session_id="s:sample:0", seq_id=0, prompt=prompt)
    await futures.post(sampling.sample, "s:sample:0:0", "tenant", "s", request)
    told = json.loads((await futures.result("tenant", "s:sample:0:0", PATIENCE)).body)
    assert told["category"] == "user"
    assert "VERSION_NOT_FOUND" in told["error"]
    assert "version 3 of run-1" in told["error"]
    assert "save_weights_for_sampler(name)" in told["error"]

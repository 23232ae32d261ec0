"""Whole models that arrive over adapter bridges are written over vLLM's weights, without a restart of vLLM."""

from __future__ import annotations

import pytest
from support.descendants import descendants
from support.models.model_versions import close, expected, publish_and_check
from support.stacks.sampler_stack import base_ref, sampling

pytest_plugins = ["support.stacks.sampler_fixtures"]


@pytest.mark.parametrize("bridge", ["stream", "volume"])
async def test_a_published_model_is_served_by_the_engine_that_is_there(
    bridge, model, volume, trainer, port, tmp_path, vllm_here
):
    async with sampling(model, port, tmp_path, bridge=bridge, serves="models", engine="vllm") as client:
        base, _ = await client.logprobs(base_ref())
        assert close(base, expected(model))
        started = descendants("EngineCore")
        assert started
        for version in (1, 2):
            await publish_and_check(volume, trainer, client, version)
        assert trainer.fetched == ([] if bridge == "volume" else ["1", "2"])
        assert descendants("EngineCore") == started

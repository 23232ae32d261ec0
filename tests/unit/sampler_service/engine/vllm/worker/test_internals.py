"""A vLLM that manages adapters in an unknown way is refused when the engine starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm

from sampler_service.engine.vllm.worker.internals import (
    ALWAYS_USED,
    PROMPT_SCORING,
    RUNNING_ADAPTERS,
    USED_BY_DIRECT_WRITES,
    VllmInternals,
)


def runner(*paths: str) -> SimpleNamespace:
    """Make an object with attributes at dotted paths, like vLLM's model runner."""
    made = SimpleNamespace()
    for path in paths:
        at = made
        for name in path.split("."):
            at.__dict__.setdefault(name, SimpleNamespace())
            at = getattr(at, name)
    return made


@pytest.mark.parametrize(("running", "scoring"), list(zip(RUNNING_ADAPTERS, PROMPT_SCORING, strict=True)))
def test_either_of_the_model_runners_is_known(running, scoring):
    VllmInternals(runner(*ALWAYS_USED, *USED_BY_DIRECT_WRITES, running, scoring), direct=True)


@pytest.mark.parametrize("gone", USED_BY_DIRECT_WRITES)
def test_what_slots_need_is_missed_by_name_and_only_by_them(gone):
    without = runner(
        *ALWAYS_USED, *(path for path in USED_BY_DIRECT_WRITES if path != gone), RUNNING_ADAPTERS[0], PROMPT_SCORING[0]
    )
    VllmInternals(without, direct=False)
    with pytest.raises(RuntimeError, match=rf"{vllm.__version__}.*no {gone}; install"):
        VllmInternals(without, direct=True)


def test_a_model_runner_that_does_not_say_which_adapters_run_is_refused():
    with pytest.raises(RuntimeError, match=" or ".join(RUNNING_ADAPTERS)):
        VllmInternals(runner(*ALWAYS_USED, *USED_BY_DIRECT_WRITES, PROMPT_SCORING[0]), direct=True)
    with pytest.raises(RuntimeError, match=" or ".join(PROMPT_SCORING)):
        VllmInternals(runner(*ALWAYS_USED, *USED_BY_DIRECT_WRITES, RUNNING_ADAPTERS[0]), direct=False)


def test_what_loading_by_vllm_needs_is_missed_too():
    with pytest.raises(RuntimeError, match="lora_manager"):
        VllmInternals(SimpleNamespace(), direct=False)

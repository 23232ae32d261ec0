"""A vLLM that manages adapters in an unknown way is refused when the engine starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm

from sampler_service.engine.vllm.worker.internals import _ALWAYS, _DIRECT, _RUNNING, _SCORING, VllmInternals


def runner(*paths: str) -> SimpleNamespace:
    """Make an object with attributes at dotted paths, like vLLM's model runner."""
    made = SimpleNamespace()
    for path in paths:
        at = made
        for name in path.split("."):
            at.__dict__.setdefault(name, SimpleNamespace())
            at = getattr(at, name)
    return made


@pytest.mark.parametrize(("running", "scoring"), list(zip(_RUNNING, _SCORING, strict=True)))
def test_either_of_the_model_runners_is_known(running, scoring):
    VllmInternals(runner(*_ALWAYS, *_DIRECT, running, scoring), direct=True)


@pytest.mark.parametrize("gone", _DIRECT)
def test_what_slots_need_is_missed_by_name_and_only_by_them(gone):
    without = runner(*_ALWAYS, *(path for path in _DIRECT if path != gone), _RUNNING[0], _SCORING[0])
    VllmInternals(without, direct=False)
    with pytest.raises(RuntimeError, match=rf"{vllm.__version__}.*no {gone}; install"):
        VllmInternals(without, direct=True)


def test_a_model_runner_that_does_not_say_which_adapters_run_is_refused():
    with pytest.raises(RuntimeError, match=" or ".join(_RUNNING)):
        VllmInternals(runner(*_ALWAYS, *_DIRECT, _SCORING[0]), direct=True)
    with pytest.raises(RuntimeError, match=" or ".join(_SCORING)):
        VllmInternals(runner(*_ALWAYS, *_DIRECT, _RUNNING[0]), direct=False)


def test_what_loading_by_vllm_needs_is_missed_too():
    with pytest.raises(RuntimeError, match="lora_manager"):
        VllmInternals(SimpleNamespace(), direct=False)

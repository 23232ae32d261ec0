"""The reprs of answers: short also where the answers are long, and the same for short ones as of any dataclass."""

from datetime import UTC, datetime

import numpy as np
import pytest

from paceline import (
    ForwardBackwardOutput,
    FullParameters,
    LogprobsResult,
    ModelInfo,
    Run,
    RunState,
    SampledSequence,
    SampleResult,
    ServedModel,
    StopReason,
)

MODULES = tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(210))
LOGPROBS = np.full(4096, -1.5, np.float32)


def run(modules):
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return Run("run-1", "tiny", FullParameters(), 3, 7, 2, RunState.READY, "", moment, 9, adapted_modules=modules)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (run(MODULES), "'model.layers.0.self_attn.q_proj', "),
        (run(MODULES), "... 210 in all), damage=()"),
        (ModelInfo("tiny", 64, 100, "float32", 8, 2, unserved_modules=MODULES), "... 210 in all)"),
        (ForwardBackwardOutput([{"logprobs": LOGPROBS}] * 1024, {"loss:sum": 2.0}), "metrics={'loss:sum': 2.0}"),
        (ForwardBackwardOutput([{"logprobs": LOGPROBS}] * 1024, {}), "... 1024 in all]"),
        (LogprobsResult(LOGPROBS, ServedModel("tiny")), "-1.5, ... float32 of shape [4096]]"),
        (SampleResult([SampledSequence(LOGPROBS, LOGPROBS, StopReason.STOP)] * 64, ServedModel("tiny")), "64 in all]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_long_answer_is_shown_in_short(answer, told):
    assert told in repr(answer)
    assert len(repr(answer)) < 3000


def test_a_short_answer_is_shown_whole():
    shown = repr(run(("a", "b")))
    assert shown.startswith("Run(run_id='run-1', base_model='tiny', parameters=FullParameters(")
    assert "adapted_modules=('a', 'b'), damage=(), executed_seq_id=0, gradient_tokens=0)" in shown
    sequence = SampledSequence(np.array([1, 2]), np.array([-1.0, -2.0]), StopReason.STOP)
    assert repr(sequence).startswith("SampledSequence(tokens=[1, 2], logprobs=[-1., -2.], stop_reason=<StopReason.STOP")

"""The reprs of answers: short also where the answers are long, and the same for short ones as of any dataclass."""

from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

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
from paceline.types.reprs import Listing

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
    assert "adapted_modules=('a', 'b'), damage=(), executed_seq_id=0, gradient_tokens=0, " in shown
    sequence = SampledSequence(np.array([1, 2]), np.array([-1.0, -2.0]), StopReason.STOP)
    assert repr(sequence).startswith("SampledSequence(tokens=[1, 2], logprobs=[-1., -2.], stop_reason=<StopReason.STOP")


class Cells(HTMLParser):
    """The texts of a table's cells, by row."""

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_data(self, data):
        self.rows[-1][-1] += data


def test_a_notebook_shows_an_answer_as_a_table_of_its_fields():
    rows = dict(Cells(run(MODULES)._repr_html_()).rows)
    assert rows["state"] == "READY"
    assert rows["create_time"] == "2026-01-01 00:00:00+00:00"
    assert rows["adapted_modules"].endswith("... 210 in all)")


def test_a_notebook_shows_a_list_as_a_table_with_a_row_for_each():
    head, first, second = Cells(Listing([run(()), replace(run(()), user_metadata={"name": "<b>"})])._repr_html_()).rows
    assert dict(zip(head, first, strict=True))["run_id"] == "run-1"
    assert dict(zip(head, second, strict=True))["user_metadata"] == "{'name': '<b>'}"
    assert Listing([1]) == [1]
    assert Listing()._repr_html_() == "[]"

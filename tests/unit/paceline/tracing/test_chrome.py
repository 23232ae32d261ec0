"""Spans as a trace for Perfetto."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from paceline.cli import main
from paceline.tracing.chrome import NoSteps, chrome_trace, last_steps
from paceline.tracing.spans import FinishedSpan


def span(name, start, end, service="trainer", parent="", trace="t", **attributes):
    """Make a span whose id is its name and times."""
    return FinishedSpan(service, name, trace, f"{name}@{start}", parent, start, end, attributes=attributes)


def step(number, start, end, run="run-1"):
    return span("OptimStep", start, end, trace=f"{run} {number}", run=run, step=number)


STEPS = [step(1, 10, 20), span("Sample", 22, 28, "sampler"), step(2, 30, 40), step(3, 50, 60), step(9, 52, 55, "run-2")]


def slices(trace):
    return {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}


def test_the_last_steps_of_a_run_come_with_all_that_happened_since_the_one_before():
    found = last_steps(STEPS, "run-1", 2)
    assert [one.attributes.get("step", one.name) for one in found] == ["Sample", 2, 3, 9]


def test_without_a_run_it_is_the_one_that_stepped_last():
    assert [one.attributes["step"] for one in last_steps(STEPS, "", 1)] == [3, 9]


def test_more_steps_than_there_are_are_all():
    assert len(last_steps(STEPS, "run-1", 100)) == len(STEPS)


@pytest.mark.parametrize("run", ["", "run-3"])
def test_without_a_step_there_is_a_sentence(run):
    with pytest.raises(NoSteps, match="trace_file"):
        last_steps([span("Sample", 1, 2)], run, 1)


def test_a_step_that_failed_is_none():
    failed = FinishedSpan("trainer", "OptimStep", "t", "s", "", 70, 80, "NON_FINITE_GRADIENT", {"run": "run-1"})
    assert last_steps([*STEPS, failed], "run-1", 1)[-1].end_ns < 70


def test_parts_are_within_their_span_and_what_overlaps_is_beside_it():
    trace = chrome_trace(
        [
            span("call", 0, 100),
            span("part", 10, 50, parent="call@0"),
            span("other part", 40, 60, parent="call@0"),
            span("call of another", 20, 45, trace="u"),
            span("next call", 200, 300, trace="v"),
        ]
    )
    found = slices(trace)
    assert found["call"]["tid"] == found["part"]["tid"] == found["next call"]["tid"]
    assert len({found[name]["tid"] for name in ("call", "other part", "call of another")}) == 3
    assert (found["part"]["ts"], found["part"]["dur"]) == (0.01, 0.04)


def test_an_arrow_leads_from_a_call_to_what_another_service_did():
    trace = chrome_trace([span("Sample", 0, 100, "gateway"), span("Sample", 10, 90, "sampler", parent="Sample@0")])
    begin, end = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    processes = {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert (begin["pid"], end["pid"]) == (processes["gateway"], processes["sampler"])
    assert begin["id"] == end["id"]


def test_a_file_that_is_no_file_of_spans_is_named(tmp_path, capsys):
    assert main(["trace", str(tmp_path / "absent.jsonl"), "--out", str(tmp_path / "out.json")]) == 1
    assert "absent.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_the_command_reads_every_file_of_a_directory(tmp_path, capsys):
    for number, one in enumerate(STEPS):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(asdict(one)) + "\n")
    out = tmp_path / "out.json"
    assert main(["trace", str(tmp_path), "--run", "run-1", "--steps", "1", "--out", str(out)]) == 0
    assert "2 spans" in capsys.readouterr().out
    assert set(slices(json.loads(out.read_text()))) == {"OptimStep"}

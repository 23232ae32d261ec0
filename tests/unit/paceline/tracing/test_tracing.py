"""Spans: off, without OpenTelemetry, to a collector and to files."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from paceline import errors, tracing
from paceline.tracing.spans import older, read_spans

CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def file(tmp_path):
    """A file that is traced to; `ended` reads it."""
    path = tmp_path / "spans" / "test.jsonl"
    tracing.start("test", "", path)
    yield path
    tracing.stop()


def ended(file):
    """Return the spans by name, after the end of tracing."""
    tracing.stop()
    return {span.name: span for span in read_spans(file)}


def test_while_tracing_is_off_a_span_is_nothing():
    assert not tracing.is_on()
    with tracing.continued(CALLER), tracing.span("work", run="a run") as span:
        span.set(tokens=1)
        span.rename("other work")
        assert tracing.current() == ""
        assert tracing.metadata() == ()
    tracing.record("work", 0, 1)


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_services_without_tracing_import_nothing_of_it():
    loads = "import sys, gateway.service, trainer_service.service, paceline.rpc.server"
    assert run(f"{loads}; print('opentelemetry' in sys.modules)") == ["False"]


def test_a_setting_needs_the_extra_and_a_variable_may_be_meant_for_others():
    program = """
import os, sys
sys.modules["opentelemetry"] = None
from paceline import errors, tracing
try:
    tracing.start("test", "http://127.0.0.1:1", None)
except errors.InvalidArgument as error:
    print(error.field, "paceline[otel]" in str(error))
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
print(tracing.start("test", "", None), tracing.is_on())
"""
    assert run(program) == ["trace_endpoint", "True", "False", "False"]


def test_spans_are_parts_of_the_callers_and_of_one_another(file):
    with tracing.continued(CALLER), tracing.span("outer", run="a run"):
        inside = tracing.metadata()
        with tracing.span("inner") as span:
            span.rename("renamed")
            span.set(tokens=3)
    found = ended(file)
    outer, inner = found["outer"], found["renamed"]
    assert (outer.trace, outer.parent, outer.service) == ("a" * 32, "b" * 16, "test")
    assert inside == (("traceparent", f"00-{'a' * 32}-{outer.span}-01"),)
    assert (inner.trace, inner.parent) == (outer.trace, outer.span)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert (outer.attributes, inner.attributes) == ({"run": "a run"}, {"tokens": 3})


def test_work_for_a_caller_that_is_not_traced_begins_a_trace_whoever_started_its_task(file):
    with tracing.continued(CALLER), tracing.continued(""), tracing.span("work"):
        pass
    assert ended(file)["work"].parent == ""


def test_a_caller_that_names_no_valid_span_is_not_continued(file):
    with tracing.continued(f"00-{'f' * 300}"), tracing.span("work"):
        pass
    assert ended(file)["work"].parent == ""


def test_what_a_caller_does_not_sample_is_not_recorded(file):
    with tracing.continued(CALLER.removesuffix("01") + "00"), tracing.span("work"):
        pass
    assert not file.exists() or not ended(file)


def test_a_span_that_has_ended_is_recorded_with_its_times_unless_its_caller_is_not_traced(file):
    now = perf_counter()
    tracing.record("queue", now - 2, now - 1, CALLER, completions=2)
    tracing.record("nobody's", now - 2, now - 1, "")
    found = ended(file)
    assert found.keys() == {"queue"}
    assert (found["queue"].trace, found["queue"].parent) == ("a" * 32, "b" * 16)
    assert found["queue"].end_ns - found["queue"].start_ns == pytest.approx(1e9, abs=1e3)


def test_an_error_is_named_and_not_quoted(file):
    with pytest.raises(errors.InvalidArgument), tracing.span("refused"):
        raise errors.InvalidArgument("a secret prompt")
    with pytest.raises(ValueError, match="a secret"), tracing.span("broken"):
        raise ValueError("a secret prompt")
    with pytest.raises(asyncio.CancelledError), tracing.span("left"):
        raise asyncio.CancelledError
    found = ended(file)
    assert [found[name].error for name in ("refused", "broken", "left")] == ["INVALID_FIELD", "ValueError", ""]
    assert found["left"].attributes == {"cancelled": True}
    assert "secret" not in file.read_text()


def test_tasks_have_spans_of_their_own(file):
    async def work(name):
        with tracing.span(name):
            await asyncio.sleep(0)
            with tracing.span(f"part of {name}"):
                await asyncio.sleep(0)

    async def all_work():
        await asyncio.gather(*(work(name) for name in "abc"))

    asyncio.run(all_work())
    found = ended(file)
    assert all(found[f"part of {name}"].parent == found[name].span for name in "abc")


def test_a_file_that_has_grown_too_large_is_followed_by_another(tmp_path):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from paceline.tracing.file_exporter import FileExporter

    path, provider = tmp_path / "test.jsonl", TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter(path, "test", most_bytes=500)))
    tracer = provider.get_tracer("test")
    for number in range(20):
        tracer.start_span(f"span {number}").end()
    kept = [span.name for span in read_spans(path)]
    assert kept == [f"span {number}" for number in range(20 - len(kept), 20)]
    assert older(path).stat().st_size < 1000
    assert 0 < len(kept) < 20


def test_a_line_that_was_cut_off_is_left_out(file):
    with tracing.span("whole"):
        pass
    tracing.stop()
    with file.open("a") as text:
        text.write('{"service": "te')
    assert [span.name for span in read_spans(file)] == ["whole"]


def test_a_full_disk_costs_spans_and_no_work(tmp_path):
    (tmp_path / "file").write_text("")
    tracing.start("test", "", tmp_path / "file" / "spans.jsonl")
    with tracing.span("work"):
        pass
    tracing.stop()


class Collector(TraceServiceServicer):
    """An OTLP collector."""

    def __init__(self):
        self.received = []

    def Export(self, request, context):  # noqa: N802
        self.received.append(request)
        return pb.ExportTraceServiceResponse()


@pytest.fixture
def collector():
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None)


@pytest.mark.parametrize("is_setting", [True, False])
def test_spans_reach_a_collector_by_a_setting_or_by_opentelemetrys_variable(collector, monkeypatch, is_setting):
    if not is_setting:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    tracing.start("trainer", collector.endpoint if is_setting else "", None)
    with tracing.span("work", tokens=3):
        pass
    tracing.stop()
    (request,) = collector.received
    (of_service,) = request.resource_spans
    resource = {one.key: one.value.string_value for one in of_service.resource.attributes}
    (span,) = of_service.scope_spans[0].spans
    assert (resource["service.name"], span.name) == ("paceline-trainer", "work")
    assert [(one.key, one.value.int_value) for one in span.attributes] == [("tokens", 3)]

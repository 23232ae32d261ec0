"""What the real services export: metrics and spans, all that the documentation lists and no other."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import httpx
import pytest
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client.parser import text_string_to_metric_families
from support.metrics_table import documented
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.ports import free_service_ports
from support.stacks.cluster import Cluster, wait_for

import paceline
from paceline.tracing import command
from paceline.tracing.spans import read_spans

SERVICES = ("gateway", "trainer", "sampler")
DATUM = paceline.Datum.from_completion([1, 2, 3], [4, 5, 6])
PROMPT, PARAMS = [1, 2, 3], paceline.SamplingParams(max_tokens=8, seed=1)
STEPS = 2
STANDARD = ("process_", "python_")
"""Prefixes of what prometheus-client's own collectors export."""
ATTRIBUTES = {
    *("run", "seq_id", "step", "version", "sampler", "policy"),
    *("bytes", "tokens", "prompt_tokens", "completions"),
    *("code", "cancelled"),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitoring")
    port, settings = free_service_ports(), {}
    for number, service in enumerate(SERVICES):
        prefix = f"PACELINE_{service.upper()}_"
        settings[f"{prefix}METRICS_LISTEN"] = f"127.0.0.1:{port + number}"
        settings[f"{prefix}TRACE_FILE"] = str(folder / "spans" / f"{service}.jsonl")
    settings["PACELINE_SAMPLER_SCRATCH_DIR"] = str(folder / "scratch")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"), **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with cluster.running():
            yield cluster


@pytest.fixture(scope="module")
def trace_id(cluster):
    """The trace of a run that was trained, published and sampled from, over gRPC and over HTTP."""
    made = secrets.randbits(128)
    span = NonRecordingSpan(SpanContext(made, secrets.randbits(64), is_remote=False, trace_flags=TraceFlags(1)))
    token = context.attach(trace.set_span_in_context(span))
    try:
        with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
            training = service.create_lora_training_client(rank=4)
            for _ in range(STEPS):
                training.forward_backward([DATUM], "cross_entropy").result()
                training.optim_step(paceline.AdamParams(learning_rate=1e-3)).result()
            sampling = training.save_weights_and_get_sampling_client()
            sampling.sample(PROMPT, sampling_params=PARAMS).result()
    finally:
        context.detach(token)
    headers = {"x-api-key": cluster.api_key, "traceparent": f"00-{made:032x}-{1:016x}-01"}
    http = cluster.services["gateway"].plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
    with httpx.Client(base_url=f"http://{http}", headers=headers, timeout=PATIENCE) as client:
        for _ in range(3):
            client.get("/v1/models").raise_for_status()
    return f"{made:032x}"


def families(cluster, service):
    address = cluster.services[service].plan.environment[f"PACELINE_{service.upper()}_METRICS_LISTEN"]
    return list(text_string_to_metric_families(httpx.get(f"http://{address}/metrics", timeout=PATIENCE).text))


def files(cluster):
    return [
        Path(cluster.services[service].plan.environment[f"PACELINE_{service.upper()}_TRACE_FILE"])
        for service in SERVICES
    ]


def spans(cluster):
    return [span for file in files(cluster) if file.exists() for span in read_spans(file)]


def paths(cluster, trace_id):
    """Return each span of a trace as the names from the first span to it, with their services."""
    mine = {span.span: span for span in spans(cluster) if span.trace == trace_id}

    def path(span):
        before = path(mine[span.parent]) if span.parent in mine else ()
        return (*before, f"{span.service}: {span.name}")

    return {path(span) for span in mine.values()}


def test_every_metric_that_a_service_exports_is_listed_with_its_labels_and_no_other(cluster, trace_id):
    exported = {}
    for family in (one for service in SERVICES for one in families(cluster, service)):
        if family.name.startswith(STANDARD) or family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = [set(sample.labels) - {"le"} for sample in family.samples]
        exported[name] = max(labels, key=len, default=None)
    assert exported.keys() == documented().keys()
    wrong = {name: labels for name, labels in exported.items() if labels not in (None, documented()[name])}
    assert not wrong


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_exports_its_own_process_and_version(cluster, service):
    found = {family.name: family for family in families(cluster, service)}
    assert found["process_resident_memory_bytes"].samples[0].value > 1 << 20
    assert found[f"paceline_{service}_build_info"].samples[0].labels == {"version": paceline.__version__}


def test_http_requests_are_counted_by_api_route_and_status(cluster, trace_id):
    (handled,) = [one for one in families(cluster, "gateway") if one.name == "paceline_gateway_http_handled"]
    counts = {tuple(sorted(one.labels.values())): one.value for one in handled.samples if one.name.endswith("_total")}
    assert counts[tuple(sorted(("openai", "GET /v1/models", "200")))] >= 3


STEP = ("gateway: Execute", "trainer: Execute")
EXPECTED = {
    (*STEP, "trainer: wait"),
    (*STEP, "trainer: journal"),
    (*STEP, "trainer: answer"),
    (*STEP, "trainer: ForwardBackward", "trainer: engine ForwardBackward", "trainer: engine wait"),
    (*STEP, "trainer: ForwardBackward", "trainer: engine ForwardBackward", "trainer: engine execute"),
    (*STEP, "trainer: OptimStep", "trainer: engine OptimStep", "trainer: engine execute"),
    (*STEP, "trainer: PublishWeights", "trainer: stage", "trainer: engine SaveAdapter", "trainer: engine write"),
    (*STEP, "trainer: PublishWeights", "trainer: stage", "trainer: hash"),
    (*STEP, "trainer: PublishWeights", "sampler: activate version"),
    ("gateway: Sample", "gateway: queue"),
    ("gateway: Sample", "sampler: Sample", "sampler: queue"),
    ("gateway: Sample", "sampler: Sample", "sampler: prefill"),
    ("gateway: Sample", "sampler: Sample", "sampler: decode"),
    ("gateway: HTTP GET /v1/models", "trainer: ListRuns"),
}
"""Paths of spans in the trace."""


def test_one_trace_shows_what_a_step_did_in_every_service(cluster, trace_id):
    wait_for(lambda: paths(cluster, trace_id) >= EXPECTED)
    # A version is loaded when it is staged, or when it is announced, whichever is first.
    loads = {path[-1] for path in paths(cluster, trace_id) if path[-2:-1] and path[-2].endswith(" version")}
    assert {"sampler: fetch", "sampler: load", "sampler: verify"} <= loads


def test_a_command_lies_within_its_call_and_after_its_wait(cluster, trace_id):
    wait_for(lambda: paths(cluster, trace_id) >= EXPECTED)
    mine = [span for span in spans(cluster) if span.trace == trace_id]
    by_id = {span.span: span for span in mine}
    for executed in (span for span in mine if span.name == "OptimStep"):
        call = by_id[executed.parent]
        (waited,) = [span for span in mine if span.parent == call.span and span.name == "wait"]
        assert call.start_ns <= waited.start_ns <= waited.end_ns <= executed.start_ns + 1_000_000
        assert executed.attributes["seq_id"] in {2, 4}


def test_spans_name_and_count_but_never_hold_what_callers_sent(cluster, trace_id):
    wait_for(lambda: paths(cluster, trace_id) >= EXPECTED)
    assert {name for span in spans(cluster) for name in span.attributes} <= ATTRIBUTES
    text = "".join(file.read_text() for file in files(cluster))
    credential = (cluster.state / "credential").read_text().strip()
    assert cluster.api_key not in text
    assert credential not in text


def test_the_log_names_the_trace_of_a_call(cluster, trace_id):
    log = cluster.services["trainer"].log.read_text()
    assert trace_id in log


def test_the_last_step_becomes_a_trace_for_perfetto(cluster, trace_id, tmp_path, capsys):
    wait_for(lambda: paths(cluster, trace_id) >= EXPECTED)
    out = tmp_path / "trace.json"
    assert command.trace([files(cluster)[0].parent], steps=1, out=out) == 0
    events = json.loads(out.read_text())["traceEvents"]
    steps = [event["args"]["step"] for event in events if event["name"] == "OptimStep"]
    assert steps == [STEPS]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == set(SERVICES)
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    assert "ui.perfetto.dev" in capsys.readouterr().out

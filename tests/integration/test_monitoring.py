"""What the real services export: metrics and spans, all that the documentation lists and no other."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.ports import free_service_ports
from support.stacks.cluster import Cluster

import paceline
from paceline.tracing.spans import read_spans

SERVICES = ("gateway", "trainer", "sampler")
DATUM = paceline.Datum.from_completion([1, 2, 3], [4, 5, 6])
PROMPT, PARAMS = [1, 2, 3], paceline.SamplingParams(max_tokens=8, seed=1)
STANDARD = ("process_", "python_")
"""Prefixes of what prometheus-client's own collectors export."""
KINDS = ("_bucket", "_count", "_sum", "_created", "_total", "")


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
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def used(cluster):
    """The cluster, after a run that was trained, published and sampled from, over gRPC and over HTTP."""
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        training = service.create_lora_training_client(rank=4)
        for _ in range(2):
            training.forward_backward([DATUM], "cross_entropy").result()
            training.optim_step(paceline.AdamParams(learning_rate=1e-3)).result()
        sampling = training.save_weights_and_get_sampling_client()
        sampling.sample(PROMPT, sampling_params=PARAMS).result()
        cluster.run_id = training.run_id
    http = cluster.services["gateway"].plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
    with httpx.Client(base_url=f"http://{http}", headers={"x-api-key": cluster.api_key}, timeout=PATIENCE) as client:
        client.get("/healthz")
        client.get("/v1/models")
    return cluster


def families(cluster, service):
    address = cluster.services[service].plan.environment[f"PACELINE_{service.upper()}_METRICS_LISTEN"]
    text = httpx.get(f"http://{address}/metrics", timeout=PATIENCE).text
    return list(text_string_to_metric_families(text))


def test_x(used):
    for service in SERVICES:
        for family in families(used, service):
            print(service, family.name, family.type, {tuple(s.labels) for s in family.samples})
    import time

    time.sleep(6)
    for service in SERVICES:
        from pathlib import Path

        p = Path(used.services[service].plan.environment[f"PACELINE_{service.upper()}_TRACE_FILE"])
        for s in read_spans(p):
            print(
                s.service,
                s.trace[:6],
                s.span[:4],
                s.parent[:4],
                s.name,
                round((s.end_ns - s.start_ns) / 1e6, 2),
                dict(s.attributes),
                s.error,
            )
    assert 0

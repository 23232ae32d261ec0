"""The gateway's own metrics. They are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge

from gateway.admission import FairQueue
from gateway.keys import KeyRing
from gateway.proxy import Router
from paceline.rpc.scraped_gauges import add_gauge


def add_router_metrics(router: Router, registry: CollectorRegistry) -> None:
    """Export which services the gateway can call, and which samplers serve another base model than the trainer."""
    add_gauge(
        "paceline_gateway_sampler_unused",
        "1 if the sampler gets no calls because its base model is not the trainer's",
        ("target",),
        lambda: [((sampler.target,), sampler in router.unused) for sampler in router.samplers],
        registry,
    )
    add_gauge(
        "paceline_gateway_upstream_ready",
        "1 if the service is connected and has said its base model",
        ("upstream", "target"),
        lambda: [((service.name, service.target), service.ready) for service in (router.trainer, *router.samplers)],
        registry,
    )


def add_call_metrics(queue: FairQueue, registry: CollectorRegistry) -> None:
    """Export each tenant's calls, forwarded and waiting."""

    def calls() -> Iterator[tuple[tuple[str, str], int]]:
        for tenant, (forwarded, waiting) in queue.by_tenant().items():
            yield (tenant, "forwarded"), forwarded
            yield (tenant, "waiting"), waiting

    description = "Calls by tenant: forwarded, or waiting for their turn"
    add_gauge("paceline_gateway_calls", description, ("tenant", "state"), calls, registry)


def add_key_metrics(keys: KeyRing, registry: CollectorRegistry) -> None:
    """Export when API keys were used last. Operators name keys, so they are few."""
    description = "When an API key was used last since the start of the gateway, in Unix time"
    last_use = "paceline_gateway_key_last_use_seconds"
    add_gauge(last_use, description, ("tenant", "key"), lambda: keys.last_use().items(), registry)


def add_http_metric(trouble: Callable[[], str], registry: CollectorRegistry) -> None:
    """Export whether the HTTP APIs are in trouble: `trouble` says which."""
    description = "1 while HTTP requests, or those that write, are refused because of the HTTP APIs' state or port"
    gauge = Gauge("paceline_gateway_http_out", description, registry=registry)
    gauge.set_function(lambda: bool(trouble()))

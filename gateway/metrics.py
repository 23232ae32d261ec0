"""The gateway's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.admission import FairQueue
from gateway.keys import KeyRing
from gateway.proxy import Router


class SamplerMetrics(Collector):
    """Reads at each scrape by Prometheus which samplers serve another base model than the trainer."""

    def __init__(self, router: Router, registry: CollectorRegistry) -> None:
        self._router = router
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield self._family()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = self._family()
        for sampler in self._router.samplers:
            family.add_metric((sampler.target,), sampler in self._router.unused)
        yield family

    def _family(self) -> GaugeMetricFamily:
        description = "1 if the sampler gets no calls because its base model is not the trainer's"
        return GaugeMetricFamily("paceline_gateway_sampler_unused", description, labels=("target",))


class CallMetrics(Collector):
    """Reads at each scrape which services the gateway can call, and each tenant's calls, forwarded and waiting."""

    def __init__(self, router: Router, queue: FairQueue, registry: CollectorRegistry) -> None:
        self._router = router
        self._queue = queue
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ready, calls = self._families()
        for upstream in (self._router.trainer, *self._router.samplers):
            ready.add_metric((upstream.name, upstream.target), upstream.ready)
        for tenant, (forwarded, waiting) in sorted(self._queue.by_tenant().items()):
            calls.add_metric((tenant, "forwarded"), forwarded)
            calls.add_metric((tenant, "waiting"), waiting)
        yield from (ready, calls)

    def _families(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily(
                "paceline_gateway_upstream_ready",
                "1 if the service is connected and has said its base model",
                labels=("upstream", "target"),
            ),
            GaugeMetricFamily(
                "paceline_gateway_calls",
                "Calls by tenant: forwarded, or waiting for their turn",
                labels=("tenant", "state"),
            ),
        )


class KeyMetrics(Collector):
    """Reads at each scrape when API keys were used last. Operators name keys, so they are few."""

    def __init__(self, keys: KeyRing, registry: CollectorRegistry) -> None:
        self._keys = keys
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield self._family()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = self._family()
        for (tenant, name), used in sorted(self._keys.last_use().items()):
            family.add_metric((tenant, name), used)
        yield family

    def _family(self) -> GaugeMetricFamily:
        description = "When an API key was used last since the start of the gateway, in Unix time"
        return GaugeMetricFamily("paceline_gateway_key_last_use_seconds", description, labels=("tenant", "key"))


def add_http_metric(trouble: Callable[[], str], registry: CollectorRegistry) -> None:
    """Register whether the HTTP APIs are in trouble: `trouble` says which, at each scrape."""
    description = "1 while HTTP requests, or those that write, are refused because of the HTTP APIs' state or port"
    gauge = Gauge("paceline_gateway_http_out", description, registry=registry)
    gauge.set_function(lambda: bool(trouble()))

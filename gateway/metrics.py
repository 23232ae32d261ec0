"""The gateway's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

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


def add_http_metric(trouble: Callable[[], str], registry: CollectorRegistry) -> None:
    """Register whether the HTTP APIs are in trouble: `trouble` says which, at each scrape."""
    description = "1 while HTTP requests, or those that write, are refused because of the HTTP APIs' state or port"
    gauge = Gauge("paceline_gateway_http_out", description, registry=registry)
    gauge.set_function(lambda: bool(trouble()))

"""Each tenant's completions as a Prometheus metric."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sampler_service.scheduling.tenant_queue import TenantQueue


class TenantMetrics(Collector):
    """Reads at each scrape what each tenant has in the engine and in the queue before it; nothing of an idle one."""

    def __init__(self, queue: TenantQueue, registry: CollectorRegistry) -> None:
        self._queue = queue
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield self._family()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = self._family()
        for tenant, (waiting, running) in sorted(self._queue.by_tenant().items()):
            family.add_metric((tenant, "waiting"), waiting)
            family.add_metric((tenant, "running"), running)
        yield family

    def _family(self) -> GaugeMetricFamily:
        description = "Completions by tenant: waiting for their turn, or in the engine"
        return GaugeMetricFamily("paceline_sampler_completions", description, labels=("tenant", "state"))

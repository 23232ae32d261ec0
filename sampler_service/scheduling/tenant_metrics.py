"""Each tenant's completions as a Prometheus metric."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from paceline.rpc.scraped_gauges import add_gauge
from sampler_service.scheduling.tenant_queue import TenantQueue


def add_tenant_metrics(queue: TenantQueue, registry: CollectorRegistry) -> None:
    """Export what each tenant has in the engine and in the queue before it; nothing of an idle one."""

    def completions() -> Iterator[tuple[tuple[str, str], int]]:
        for tenant, (waiting, running) in queue.by_tenant().items():
            yield (tenant, "waiting"), waiting
            yield (tenant, "running"), running

    description = "Completions by tenant: waiting for their turn, or in the engine"
    add_gauge("paceline_sampler_completions", description, ("tenant", "state"), completions, registry)

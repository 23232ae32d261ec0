"""Quotas as Prometheus metrics: each tenant's usage, and the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.types import Quota


class QuotaMetrics(Collector):
    """Reads quotas at each scrape by Prometheus. Tenants without usage have no values."""

    def __init__(
        self,
        service: str,
        tenants: Callable[[], Iterable[str]],
        quotas: Callable[[str], Sequence[Quota]],
        registry: CollectorRegistry,
    ) -> None:
        """`tenants` returns those with usage, `quotas` a tenant's quotas. Tenants are few: operators name them."""
        self._prefix = f"paceline_{service}_quota"
        self._tenants = tenants
        self._quotas = quotas
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        used, limit = self._families()
        for quota in self._quotas(""):
            limit.add_metric((quota.name,), quota.limit)
        for tenant in sorted(set(self._tenants())):
            for quota in self._quotas(tenant):
                used.add_metric((tenant, quota.name), quota.used)
        yield from (used, limit)

    def _families(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily(
                f"{self._prefix}_used", "What a tenant has of what is scarce", labels=("tenant", "quota")
            ),
            GaugeMetricFamily(f"{self._prefix}_limit", "What a tenant may have; 0 is no limit", labels=("quota",)),
        )

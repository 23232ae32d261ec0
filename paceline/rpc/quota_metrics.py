"""Quotas as Prometheus metrics: each tenant's usage, and the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry

from paceline.rpc.scraped_gauges import add_gauge
from paceline.types import Quota


def add_quota_metrics(
    service: str,
    tenants: Callable[[], Iterable[str]],
    quotas: Callable[[str], Sequence[Quota]],
    registry: CollectorRegistry,
) -> None:
    """Export quotas. `tenants` returns those with usage, `quotas` a tenant's quotas; other tenants have no values.

    Tenants are few: operators name them.
    """
    prefix = f"paceline_{service}_quota"
    add_gauge(
        f"{prefix}_used",
        "What a tenant has of what is scarce",
        ("tenant", "quota"),
        lambda: [((tenant, quota.name), quota.used) for tenant in set(tenants()) for quota in quotas(tenant)],
        registry,
    )
    add_gauge(
        f"{prefix}_limit",
        "What a tenant may have; 0 is no limit",
        ("quota",),
        lambda: [((quota.name,), quota.limit) for quota in quotas("")],
        registry,
    )

"""Quotas in Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.rpc.quota_metrics import add_quota_metrics
from paceline.types import Quota


def test_use_is_shown_by_tenant_and_limits_once():
    used = {"anquetil": 3, "bartali": 5}
    registry = CollectorRegistry()
    add_quota_metrics("sampler", lambda: used, lambda tenant: [Quota("versions", used.get(tenant, 0), 16)], registry)

    def value(tenant: str) -> float | None:
        return registry.get_sample_value("paceline_sampler_quota_used", {"tenant": tenant, "quota": "versions"})

    assert (value("anquetil"), value("bartali"), value("coppi")) == (3, 5, None)
    del used["anquetil"]
    assert (value("anquetil"), value("bartali")) == (None, 5)
    assert registry.get_sample_value("paceline_sampler_quota_limit", {"quota": "versions"}) == 16

"""Prometheus metrics of the base model's certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.errors import EngineUnavailable
from paceline.types import ModelCertificate, ModelInfo, PackingMode


class CertificateMetrics(Collector):
    """Reads at each scrape the certificate that GetServerInfo returns; empty until an engine has loaded a model."""

    def __init__(self, describe: Callable[[], ModelInfo], registry: CollectorRegistry) -> None:
        """`describe` returns the loaded model, and raises EngineUnavailable while there is none."""
        self._describe = describe
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from _families(None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            certificate = self._describe().certificate
        except EngineUnavailable:
            return
        yield from _families(certificate)


def _families(found: ModelCertificate | None) -> Iterator[GaugeMetricFamily]:
    prefix = "paceline_trainer_certificate"
    difference = GaugeMetricFamily(
        f"{prefix}_difference", "How far runs compute from stock transformers", labels=("of",)
    )
    bound = GaugeMetricFamily(f"{prefix}_bound", "What rounding may make of that difference", labels=("of",))
    seconds = GaugeMetricFamily(f"{prefix}_seconds", "Time that the check took at the last load")
    packs = GaugeMetricFamily(f"{prefix}_packs", "1 if sequences share passes, else 0", labels=("attention",))
    if found is not None:
        difference.add_metric(("logprobs",), found.logprob_difference)
        difference.add_metric(("gradients",), found.gradient_difference)
        bound.add_metric(("logprobs",), found.logprob_bound)
        bound.add_metric(("gradients",), found.gradient_bound)
        seconds.add_metric((), found.seconds)
        packs.add_metric((found.attention,), float(found.packing is PackingMode.PACKED))
    yield from (difference, bound, seconds, packs)

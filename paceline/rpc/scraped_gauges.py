"""Gauges whose values are read when Prometheus asks, so that keeping them costs nothing between scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


def add_gauge(
    name: str,
    description: str,
    labels: Sequence[str],
    read: Callable[[], Iterable[tuple[Sequence[str], float]]],
    registry: CollectorRegistry,
) -> None:
    """Export a gauge. `read` returns the values that there are now, each after the values of its labels.

    It is called in the thread of a scrape.
    """
    registry.register(_ScrapedGauge(name, description, labels, read))


class _ScrapedGauge(Collector):
    def __init__(
        self,
        name: str,
        description: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[Sequence[str], float]]],
    ) -> None:
        self._empty = partial(GaugeMetricFamily, name, description, labels=labels)
        self._read = read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield self._empty()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = self._empty()
        for labels, value in sorted(self._read()):
            family.add_metric(labels, value)
        yield family

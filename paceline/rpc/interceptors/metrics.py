"""Prometheus metrics of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.rpc.interceptors.around import AroundInterceptor, Call
from paceline.rpc.interceptors.outcome import outcome

OTHER = "other"
"""Label of calls to methods that the service does not have."""
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300)


class MetricsInterceptor(AroundInterceptor):
    """Counts calls by method and code, and times them."""

    def __init__(self, registry: CollectorRegistry, methods: Collection[str]) -> None:
        """`methods` are counted by name, as /package.Service/Method; all others share one label.

        Names come from callers, and each label lasts as long as the process.
        """
        self._methods = frozenset(methods)
        self._handled = Counter("paceline_rpc_handled_total", "Calls that ended", ["method", "code"], registry=registry)
        self._seconds = Histogram(
            "paceline_rpc_seconds", "Time that calls took", ["method"], buckets=_SECONDS, registry=registry
        )
        self._in_flight = Gauge("paceline_rpc_in_flight", "Calls in progress", ["method"], registry=registry)

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        start, code = perf_counter(), "OK"
        method = call.method if call.method in self._methods else OTHER
        self._in_flight.labels(method).inc()
        try:
            yield
        except BaseException as error:
            code = outcome(error, call)
            raise
        finally:
            self._in_flight.labels(method).dec()
            self._handled.labels(method, code).inc()
            self._seconds.labels(method).observe(perf_counter() - start)

"""Prometheus metrics of HTTP requests, as `paceline.rpc` has them of gRPC calls."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

from paceline.rpc.interceptors import BUCKET_SECONDS

OTHER = "other"
"""Label of requests that reached no route: of unknown paths, and those that were refused before."""


class HttpMetrics:
    """Counts requests by API, route and status, and their bytes; times them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix, labels = "paceline_gateway_http", ["api", "route"]
        self._handled = Counter(
            f"{prefix}_handled_total", "HTTP requests that ended", [*labels, "code"], registry=registry
        )
        self._seconds = Histogram(
            f"{prefix}_seconds", "Time that HTTP requests took", labels, buckets=BUCKET_SECONDS, registry=registry
        )
        self._received = Counter(
            f"{prefix}_received_bytes_total", "Bytes of the bodies of HTTP requests", labels, registry=registry
        )
        self._sent = Counter(
            f"{prefix}_sent_bytes_total", "Bytes of the bodies of HTTP responses", labels, registry=registry
        )
        self.in_flight = Gauge(f"{prefix}_in_flight", "HTTP requests in progress", registry=registry)

    def ended(self, scope: Scope, status: int, seconds: float, received: int, sent: int) -> None:
        """Count a request that ended; `status` is 0 if nothing was answered because the caller left."""
        labels = route_of(scope)
        self._handled.labels(*labels, str(status)).inc()
        self._seconds.labels(*labels).observe(seconds)
        self._received.labels(*labels).inc(received)
        self._sent.labels(*labels).inc(sent)


def route_of(scope: Scope) -> tuple[str, str]:
    """Return the API and the route of a request: names of this code, because each label lasts as long as the process.

    The API is the first tag of the route's router.
    """
    route: Any = scope.get("route")  # set by the application
    if route is None or scope["method"] not in (route.methods or ()):
        return OTHER, OTHER
    return (route.tags or [OTHER])[0], f"{scope['method']} {route.path}"

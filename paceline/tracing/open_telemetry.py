"""Spans made and exported by OpenTelemetry's SDK (the extra `otel`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns, time_ns

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline.errors import PacelineError
from paceline.tracing import TRACEPARENT_KEY, Attribute
from paceline.tracing.file_exporter import FileExporter

_PROPAGATOR = TraceContextTextMapPropagator()


class OpenTelemetryTracer:
    """Exports in batches, from threads of its own. Implements `Tracer`."""

    def __init__(self, service: str, endpoint: str, file: Path | None, *, has_endpoint: bool) -> None:
        """Trace to a file, if given, and with `has_endpoint` to `endpoint`, or, if it is empty, as variables say."""
        resource = Resource.create({"service.name": f"paceline-{service}", "service.version": version("paceline")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if has_endpoint:
            # A scheme says whether the endpoint has TLS, as in OpenTelemetry's variables.
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
        if file is not None:
            self._provider.add_span_processor(BatchSpanProcessor(FileExporter(file, service)))
        self._tracer = self._provider.get_tracer("paceline")

    @contextmanager
    def span(self, name: str, attributes: dict[str, Attribute]) -> Iterator[_Span]:
        started = self._tracer.start_span(name, attributes=attributes)
        token = context.attach(trace.set_span_in_context(started))
        try:
            yield _Span(started)
        except BaseException as error:
            # The message may quote what the caller sent, so only the kind of the error is recorded.
            if isinstance(error, asyncio.CancelledError | GeneratorExit):
                started.set_attribute("cancelled", True)
            else:
                reason = error.reason if isinstance(error, PacelineError) else type(error).__name__
                started.set_status(StatusCode.ERROR, reason)
            raise
        finally:
            context.detach(token)
            started.end()

    def record(self, name: str, start: float, end: float, parent: str | None, attributes: dict[str, Attribute]) -> None:
        offset = time_ns() - perf_counter_ns()
        of = None if parent is None else _extracted(parent)
        span = self._tracer.start_span(name, of, attributes=attributes, start_time=int(1e9 * start) + offset)
        span.end(int(1e9 * end) + offset)

    def current(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        return carrier.get(TRACEPARENT_KEY, "")

    @contextmanager
    def continued(self, traceparent: str) -> Iterator[None]:
        token = context.attach(_extracted(traceparent))
        try:
            yield
        finally:
            context.detach(token)

    def close(self) -> None:
        self._provider.shutdown()


class _Span:
    """Implements `paceline.tracing.Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)


def _extracted(traceparent: str) -> context.Context:
    """Return a context whose current span is the named one; that of now if the name is not one."""
    return _PROPAGATOR.extract({TRACEPARENT_KEY: traceparent})

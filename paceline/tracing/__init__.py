"""Spans of work, one trace for each call, across processes. They are OpenTelemetry's; off unless a setting turns it on.

While tracing is off nothing of OpenTelemetry is imported, and a span costs a function call. Attributes name things
(runs, versions, methods) and count them; they never hold prompts, tokens or keys. Another process's span is named by
its W3C traceparent, a string that is empty where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from paceline.errors import InvalidArgument

TRACEPARENT_KEY = "traceparent"
"""Metadata, and HTTP header, that names the caller's span (W3C Trace Context)."""

Attribute = str | int | float | bool
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Span(Protocol):
    """A span that has not ended."""

    def set(self, **attributes: Attribute) -> None:
        """Set attributes."""

    def rename(self, name: str) -> None:
        """Give it another name."""


class Tracer(Protocol):
    """Makes spans, and exports those that have ended."""

    def span(self, name: str, attributes: dict[str, Attribute]) -> AbstractContextManager[Span]:
        """Return a span that is current, and lasts, while a block runs. An error ends it too, and is named."""
        ...

    def record(self, name: str, start: float, end: float, parent: str | None, attributes: dict[str, Attribute]) -> None:
        """Record a span that has ended, from and to seconds of `perf_counter`. None: a child of the current one."""
        ...

    def current(self) -> str:
        """Return the current span's traceparent; empty if there is none."""
        ...

    def continued(self, traceparent: str) -> AbstractContextManager[None]:
        """Make the named span, perhaps of another process, the current one while a block runs."""
        ...

    def close(self) -> None:
        """Export what has ended and was not exported yet."""
        ...


class _NoSpan:
    def set(self, **attributes: Attribute) -> None:
        pass

    def rename(self, name: str) -> None:
        pass


_NO_SPAN: AbstractContextManager[Span] = nullcontext(_NoSpan())
_NOTHING: AbstractContextManager[None] = nullcontext()
# A process has one tracer, as it has one log: spans are made wherever work is done.
_tracer: Tracer | None = None


def start(service: str, endpoint: str, file: Path | None) -> bool:
    """Trace from now on, if asked to, to an OTLP endpoint and to a file of JSON lines.

    Without `endpoint` OpenTelemetry's own variables count. If OpenTelemetry is not installed, raises InvalidArgument
    where a setting asks for it, and returns False where only a variable does, which may be meant for others.
    """
    global _tracer  # noqa: PLW0603
    by_variable = any(map(os.environ.get, _ENDPOINTS))
    if not endpoint and file is None and not by_variable:
        return True
    try:
        from paceline.tracing.open_telemetry import OpenTelemetryTracer  # noqa: PLC0415 - an extra
    except ImportError as error:
        if not endpoint and file is None:
            return False
        field = "trace_endpoint" if endpoint else "trace_file"
        raise InvalidArgument("needs OpenTelemetry; install paceline[otel]", field=field) from error
    stop()
    _tracer = OpenTelemetryTracer(service, endpoint, file, has_endpoint=bool(endpoint) or by_variable)
    return True


def stop() -> None:
    """Export what is left, and trace no more."""
    global _tracer  # noqa: PLW0603
    if _tracer is not None:
        _tracer.close()
    _tracer = None


def is_on() -> bool:
    """Return whether spans are recorded."""
    return _tracer is not None


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """Return a span that lasts while a block runs; spans made in the block are its children."""
    return _NO_SPAN if _tracer is None else _tracer.span(name, attributes)


def record(name: str, start: float, end: float, parent: str | None = None, **attributes: Attribute) -> None:
    """Record a span that has ended, by its times in seconds of `perf_counter`; a child of `parent`, or the current one.

    With an empty `parent` nothing is recorded: a part of what nobody traced says nothing.
    """
    if _tracer is not None and parent != "":
        _tracer.record(name, start, end, parent, attributes)


def current() -> str:
    """Return the traceparent of the current span; empty if there is none."""
    return "" if _tracer is None else _tracer.current()


def continued(traceparent: str) -> AbstractContextManager[None]:
    """Make spans that begin while a block runs children of the named one; the first of traces if none is named.

    Work that is done for a caller by a task that others may have started says so for whom it is done.
    """
    return _NOTHING if _tracer is None else _tracer.continued(traceparent)


def metadata() -> Sequence[tuple[str, str]]:
    """Return the metadata that makes the called service's spans children of the current one."""
    named = current()
    return ((TRACEPARENT_KEY, named),) if named else ()


def trace_of(traceparent: str) -> str:
    """Return the id of the trace that a span is of, in hexadecimal; empty if none is named."""
    return traceparent[3:35]

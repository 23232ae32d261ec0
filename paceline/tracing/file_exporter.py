"""Writes spans to a file, for machines without a collector."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from paceline.tracing.spans import FinishedSpan, older

_MOST_BYTES = 64 << 20
"""Size beyond which another file is begun."""


class FileExporter(SpanExporter):
    """Appends spans to a file. Called from one thread."""

    def __init__(self, path: Path, service: str, most_bytes: int = _MOST_BYTES) -> None:
        self._path = path
        self._service = service
        self._most_bytes = most_bytes

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(asdict(_finished(self._service, span))) + "\n" for span in spans)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(lines)
                size = file.tell()
            if size > self._most_bytes:
                self._path.replace(older(self._path))
        except OSError:  # a full disk costs spans, never work
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: the file is closed after each batch."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: nothing is held back."""
        return True


def _finished(service: str, span: ReadableSpan) -> FinishedSpan:
    found, status = span.get_span_context(), span.status
    return FinishedSpan(
        service=service,
        name=span.name,
        trace=f"{found.trace_id:032x}" if found else "",
        span=f"{found.span_id:016x}" if found else "",
        parent=f"{span.parent.span_id:016x}" if span.parent else "",
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        error="" if status.is_ok or status.is_unset else status.description or "error",
        attributes={
            name: value for name, value in (span.attributes or {}).items() if isinstance(value, str | int | float)
        },
    )

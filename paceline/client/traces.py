"""Calls as spans of the application's own traces, if it has OpenTelemetry; it alone says where they go."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

Metadata = Sequence[tuple[str, str]]
_UNTRACED: AbstractContextManager[Metadata] = nullcontext(())


def calling(name: str) -> AbstractContextManager[Metadata]:
    """Return a span that lasts while a block runs, as the metadata by which the service continues its trace.

    An application that has not imported OpenTelemetry has no traces, so nothing is imported for it.
    """
    return _span(name) if "opentelemetry.trace" in sys.modules else _UNTRACED


@contextmanager
def _span(name: str) -> Iterator[Metadata]:
    from opentelemetry import propagate, trace  # noqa: PLC0415 - the application has

    tracer = trace.get_tracer("paceline")
    # An error's message may quote what was sent.
    with tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False):
        carried: dict[str, str] = {}
        propagate.inject(carried)
        yield [(key, value) for key, value in carried.items() if key in {"traceparent", "tracestate"}]

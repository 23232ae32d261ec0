"""Spans as a trace that Perfetto (ui.perfetto.dev) and Chrome's about:tracing open, in the Trace Event Format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.tracing.spans import FinishedSpan

STEP = "OptimStep"
"""Name of the span that executes a step; its attribute `step` is the run's step after it."""
SERVICES = ("gateway", "trainer", "sampler")
Event = Mapping[str, Any]


class NoSteps(Exception):
    """No span of a step was found. The message says what to do."""


def last_steps(spans: Iterable[FinishedSpan], run: str, steps: int) -> list[FinishedSpan]:
    """Return the spans from the end of the step before the last `steps` of a run until the end of the last one.

    An empty `run` means the run that stepped last. Spans of other runs are among them: they share the services. Raises
    NoSteps.
    """
    spans = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    taken = [span for span in spans if span.name == STEP and not span.error and run in {"", span.attributes.get("run")}]
    if not taken:
        of = f"of {run} " if run else ""
        raise NoSteps(f"no step {of}is in the files; train with `trace_file` set for each service, then try again")
    last = max(taken, key=lambda span: span.end_ns)
    ends = sorted(span.end_ns for span in taken if span.attributes.get("run") == last.attributes.get("run"))
    after = ends[-steps - 1] if len(ends) > steps else 0
    return [span for span in spans if span.end_ns > after and span.start_ns < last.end_ns]


def chrome_trace(spans: Sequence[FinishedSpan]) -> dict[str, Any]:
    """Return the trace as JSON: a process for each service, and arrows from calls to what other services did."""
    services = [*SERVICES, *sorted({span.service for span in spans} - {*SERVICES})]
    processes = {service: number for number, service in enumerate(services, start=1)}
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": service}} for service, pid in processes.items()
    ]
    origin = min((span.start_ns for span in spans), default=0)
    places: dict[str, Event] = {}
    for service, pid in processes.items():
        for lane, span in _in_lanes([span for span in spans if span.service == service]):
            event = {
                "ph": "X",
                "name": span.name,
                "cat": service,
                "pid": pid,
                "tid": lane,
                "ts": (span.start_ns - origin) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {**span.attributes, "trace": span.trace} | ({"error": span.error} if span.error else {}),
            }
            places[span.span] = event
            events.append(event)
    for span in spans:
        caller, called = places.get(span.parent), places[span.span]
        if caller is not None and caller["pid"] != called["pid"]:
            events.extend(_arrow(span.span, caller, called))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _in_lanes(spans: Sequence[FinishedSpan]) -> Iterator[tuple[int, FinishedSpan]]:
    """Yield each span with its lane: spans of a lane lie within one another, or one after the other.

    A span is in its parent's lane where there is room.
    """
    lanes: list[list[FinishedSpan]] = []
    lane_of: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        preferred = lane_of.get(span.parent)
        order = [*([] if preferred is None else [preferred]), *range(len(lanes))]
        lane = next((number for number in order if _has_room(lanes[number], span)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span)
        lane_of[span.span] = lane
        yield lane + 1, span


def _has_room(lane: list[FinishedSpan], span: FinishedSpan) -> bool:
    """Return whether a span fits into a lane; forget there what has ended before it."""
    while lane and lane[-1].end_ns <= span.start_ns:
        lane.pop()
    if not lane:
        return True
    # Within another trace's span it would look like a part of that one.
    return lane[-1].end_ns >= span.end_ns and lane[-1].trace == span.trace


def _arrow(name: str, caller: Event, called: Event) -> Iterator[Event]:
    # It begins within the caller, whose clock is another machine's perhaps.
    begin = min(max(called["ts"], caller["ts"]), caller["ts"] + caller["dur"])
    common = {"cat": "call", "name": "call", "id": name}
    yield {"ph": "s", "pid": caller["pid"], "tid": caller["tid"], "ts": begin, **common}
    yield {"ph": "f", "bp": "e", "pid": called["pid"], "tid": called["tid"], "ts": called["ts"], **common}

"""Spans that have ended, as lines of JSON in a file: a span is a line.

A file that has grown too large is renamed to <name>.1, in place of the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """A span that has ended."""

    service: str
    """trainer, sampler or gateway."""
    name: str
    trace: str
    """Id of its trace, in hexadecimal."""
    span: str
    parent: str
    """Id of the span that it is a part of; empty for the first of a trace."""
    start_ns: int
    """Nanoseconds since 1970."""
    end_ns: int
    error: str = ""
    """What kind of error ended it; empty if none did."""
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)


def older(path: Path) -> Path:
    """Return where the previous spans of a file are."""
    return path.with_name(f"{path.name}.1")


def read_spans(path: Path) -> Iterator[FinishedSpan]:
    """Yield the spans of a file and of the one before it. A line that was cut off is left out. Raises OSError."""
    for part in (older(path), path):
        if part == path or part.exists():
            with part.open() as lines:
                for line in lines:
                    if line.endswith("\n"):
                        yield FinishedSpan(**json.loads(line))

"""Rows as the files hold them: one JSON object a line, which people can read too."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from math import isfinite, isnan

import msgspec

StoredValues = dict[str, float | str]
"""Values by name. JSON has no NaN and no infinity: they are "NaN", "Infinity" and "-Infinity"."""


class RowSource(Enum):
    """Who wrote a row."""

    TRAINER = "trainer"
    CLIENT = "client"


class Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every line has: its number, and what tells that it is there already."""

    number: int = 0
    """Place in the file, from 1; given when it is written."""
    step: int = -1
    """Optimizer steps taken."""
    source: RowSource = RowSource.CLIENT
    command: str = ""
    """The trainer's command that it is about; empty if it is about none."""
    seq_id: int = 0
    """Place of that command in the run's order; 0 if it is about none."""
    request_id: str = ""
    """The client's request that it came with; empty if the trainer wrote it."""


class StoredRow(Stored, frozen=True, kw_only=True, omit_defaults=True):
    """A line of metrics.jsonl."""

    source: RowSource
    time: datetime
    values: StoredValues


class StoredRollout(Stored, frozen=True, kw_only=True, omit_defaults=True):
    """A line of rollouts.jsonl."""

    time: datetime
    prompt: str = ""
    completion: str = ""
    reward: float | str | None = None
    extras: dict[str, str] = msgspec.field(default_factory=dict)


def stored_value(value: float) -> float | str:
    """Return a value as JSON holds it."""
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def stored_values(values: Mapping[str, float]) -> StoredValues:
    """Return values as JSON holds them."""
    return {name: stored_value(value) for name, value in values.items()}

"""What commands print: one JSON document, JSON lines, or tables; notes and errors on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import singledispatch
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
"""The option of every command that prints data."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_WIDE = 100_000
"""Columns of an output that is no terminal: lines are not folded."""


class CommandFailed(Exception):
    """A command cannot do what was asked. The message is one sentence: why, and what to do."""


def show_json(document: object) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(as_json(document), indent=2, allow_nan=False) + "\n")


def show_json_line(document: object) -> None:
    """Print one line of JSON, at once."""
    sys.stdout.write(json.dumps(as_json(document), allow_nan=False) + "\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", empty: str = "") -> None:
    """Print a table; without rows, the sentence `empty`. Columns that begin with > are aligned to the right."""
    listed = [[_cell(value) for value in row] for row in rows]
    if not listed:
        _print(Text(empty))
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in listed:
        table.add_row(*map(Text, row[: len(columns)]))
    _print(table)


def show_fields(pairs: Iterable[tuple[str, object]], *, title: str = "") -> None:
    """Print one thing: a line for each field that has a value."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value not in (None, "", (), [], {}):
            table.add_row(Text(name), Text(_cell(value)))
    _print(table)


def say(line: str) -> None:
    """Print a note on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@singledispatch
def as_json(value: object) -> Any:
    """Return dataclasses, enums, times and the like as JSON has them; a number that is not finite is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value)}
    return value


@as_json.register
def _(value: Mapping) -> Any:  # type: ignore[type-arg] # singledispatch takes no parameters
    return {str(key): as_json(one) for key, one in value.items()}


@as_json.register(list)
@as_json.register(tuple)
@as_json.register(Set)
def _(value: Iterable[object]) -> Any:
    return [as_json(one) for one in value]


@as_json.register
def _(value: Enum) -> Any:
    return value.name.lower()


@as_json.register
def _(value: datetime) -> Any:
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


@as_json.register
def _(value: Path) -> Any:
    return str(value)


@as_json.register
def _(value: float) -> Any:
    return value if math.isfinite(value) else None


def bytes_in_words(size: int) -> str:
    """Return a number of bytes as people read it, such as 1.5 GB."""
    number = float(size)
    for unit in _UNITS:
        if number < 1000 or unit == _UNITS[-1]:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError


def seconds_in_words(seconds: float) -> str:
    """Return a duration as people read it, such as 3 h or 12 days."""
    for name, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"


def ago(moment: datetime | None) -> str:
    """Return how long ago a time was; empty for none."""
    if moment is None:
        return ""
    return f"{seconds_in_words(max(0.0, (datetime.now(UTC) - moment).total_seconds()))} ago"


def until(moment: datetime | None) -> str:
    """Return how long it is until a time."""
    if moment is None:
        return "never"
    seconds = (moment - datetime.now(UTC)).total_seconds()
    return f"in {seconds_in_words(seconds)}" if seconds > 0 else "now"


def _cell(value: object) -> str:
    match value:
        case None:
            text = ""
        case bool():
            text = "yes" if value else "no"
        case Enum():
            text = value.name.lower()
        case datetime():
            text = value.astimezone().strftime("%Y-%m-%d %H:%M")
        case Mapping():
            text = ", ".join(f"{key}={one}" for key, one in value.items())
        case list() | tuple():
            text = ", ".join(map(_cell, value))
        case _:
            text = str(value)
    return text


def _print(shown: RenderableType) -> None:
    # A console is made at each use, because tests and shells exchange the streams.
    if sys.stdout.isatty():
        Console(file=sys.stdout, highlight=False).print(shown)
        return
    console = Console(file=StringIO(), width=_WIDE, highlight=False)
    with console.capture() as written:
        console.print(shown)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in written.get().splitlines())

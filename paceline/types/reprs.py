"""How answers show themselves: in one short line, and as tables in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from html import escape
from typing import Any, TypeVar

import numpy as np

_MOST = 8
"""How many elements of a list or an array are shown."""
_MOST_ENTRIES = 32
"""How many entries of a dict are shown: all metrics of a pass, for instance."""
_LONGEST = 100
"""How many characters of a text are shown."""


T = TypeVar("T")


class ShortRepr:
    """Base of dataclasses declared with `repr=False`, whose repr shows the start of what is long, and its length.

    Notebooks show a table of the fields instead.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        shown = [f"{field.name}={_short(getattr(self, field.name))}" for field in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        return _html((type(self).__name__, ""), rows)


class Listing(list[T]):
    """A list of answers, which notebooks show as a table with a row for each."""

    def _repr_html_(self) -> str:
        first = self[0] if self else None
        if first is None or not is_dataclass(first):
            return escape(repr(self))
        names = [field.name for field in fields(first)]
        return _html(names, [[getattr(each, name) for name in names] for each in self])


def _html(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table."""
    lines = [f"<tr>{''.join(f'<td>{escape(_cell(value))}</td>' for value in row)}</tr>" for row in rows]
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: Any) -> str:
    match value:
        case Enum():
            return value.name
        case None:
            return ""
        case str() if len(value) <= _LONGEST:
            return value
        case datetime():
            return value.isoformat(sep=" ", timespec="seconds")
        case _:
            return _short(value)


def _short(value: Any) -> str:
    match value:
        case np.ndarray():
            whole = value.size <= _MOST
            text = np.array2string(value if whole else value.ravel()[:_MOST], max_line_width=1000, separator=", ")
            return text if whole else f"{text[:-1]}, ... {value.dtype} of shape {list(value.shape)}]"
        case dict():
            most, ends = _MOST_ENTRIES, "{}"
            parts = [f"{_short(key)}: {_short(each)}" for key, each in [*value.items()][:most]]
        case list() | tuple():
            most, ends = _MOST, "[]" if isinstance(value, list) else "()"
            parts = [_short(each) for each in value[:most]]
        case str() if len(value) > _LONGEST:
            return f"{value[:_LONGEST]!r}... {len(value)} characters"
        case _:
            return repr(value)
    if len(value) > most:
        parts.append(f"... {len(value)} in all")
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{ends[0]}{', '.join(parts)}{comma}{ends[1]}"

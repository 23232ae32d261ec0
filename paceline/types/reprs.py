"""Short reprs of answers that hold long lists and arrays."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

_MOST = 8
"""How many elements of a list or an array are shown."""
_MOST_ENTRIES = 32
"""How many entries of a dict are shown: all metrics of a pass, for instance."""
_LONGEST = 100
"""How many characters of a text are shown."""


class ShortRepr:
    """Base of dataclasses declared with `repr=False`, whose repr shows the start of what is long, and its length."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = [f"{field.name}={_short(getattr(self, field.name))}" for field in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(shown)})"


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

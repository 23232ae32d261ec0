"""Arguments that are text: any, or one of a few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from paceline import errors

T = TypeVar("T")


def chosen(value: object, choices: Mapping[str, T], field: str) -> T:
    """Return what a word stands for. Raises InvalidArgument for anything that is none of the words."""
    if not isinstance(value, str) or value not in choices:
        *others, last = choices
        raise errors.InvalidArgument(f"is {value!r}; use {', '.join(others)} or {last}", field=field)
    return choices[value]


def text_of(value: object, field: str) -> str:
    """Return an argument that is text, or "" for None. Raises InvalidArgument.

    For arguments that are looked at before a message is made of them: whether an array is empty cannot be asked.
    """
    if not isinstance(value, str | None):
        raise errors.InvalidArgument.of_type(value, "a string", field)
    return value or ""

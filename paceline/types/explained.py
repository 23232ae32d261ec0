"""The documentation of fields, which Python itself drops, in that of their class: `help(paceline.Run)`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any


def explain(classes: Iterable[Any]) -> None:
    """Add what the source says of each field to the documentation of the dataclasses and enums among these."""
    for cls in classes:
        if inspect.isclass(cls) and (is_dataclass(cls) or issubclass(cls, Enum)):
            cls.__doc__ = _Documentation(cls)  # type: ignore[assignment]


class _Documentation:
    """Documentation that is made when it is asked for, because the source has to be read for it."""

    def __init__(self, cls: type) -> None:
        self._cls, self._own = cls, inspect.cleandoc(cls.__doc__ or "")

    def __get__(self, _instance: object, _owner: type | None = None) -> str:
        lines = [line for base in reversed(self._cls.__mro__) for line in _lines_of(base)]
        return "\n".join([self._own, "", "Attributes:", *lines]) if lines else self._own


@cache
def _lines_of(cls: type) -> tuple[str, ...]:
    """Return a description of each field that a class of ours declares."""
    if cls.__module__.partition(".")[0] != "paceline":
        return ()
    try:
        module = ast.parse(inspect.getsource(inspect.getmodule(cls)))  # type: ignore[arg-type]
    except (OSError, TypeError):  # installed without sources
        return ()
    declared = next(
        (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__), None
    )
    return () if declared is None else tuple(_described(declared.body))


def _described(body: list[ast.stmt]) -> Iterator[str]:
    for statement, after in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Name(name)):
                default = f" = {ast.unparse(statement.value)}" if isinstance(statement.value, ast.Constant) else ""
                head = f"{name} ({ast.unparse(statement.annotation)}{default})"
            case ast.Assign(targets=[ast.Name(name)]) if not name.startswith("_"):
                head = name
            case _:
                continue
        match after:
            case ast.Expr(value=ast.Constant(value=str(text))):
                first, *rest = inspect.cleandoc(text).splitlines()
                yield f"    {head}: {first}"
                yield from (f"        {line}".rstrip() for line in rest)
            case _:
                yield f"    {head}"

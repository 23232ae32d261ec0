"""What to write instead of an argument that a function or a class does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import iscoroutinefunction, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def hinted(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator by which a function refuses arguments that it lacks with a TypeError that says what to write.

    `instead` says it for names that people know from elsewhere; for other names it is the nearest argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = tuple(name for name in signature(function).parameters if name != "self")
        is_init = function.__name__ == "__init__"
        owner = function.__qualname__.removesuffix(".__init__") if is_init else f"{function.__name__}()"

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            _check(owner, kwargs, known, instead)
            return function(*args, **kwargs)

        @wraps(function)
        async def checked_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            _check(owner, kwargs, known, instead)
            return await function(*args, **kwargs)  # type: ignore[misc]

        return checked_async if iscoroutinefunction(function) else checked  # type: ignore[return-value]

    return decorate


def hinted_fields(**instead: str) -> Callable[[C], C]:
    """Return what `hinted` does, for a dataclass."""

    def decorate(cls: C) -> C:
        known, make = tuple(field.name for field in fields(cls)), cls.__init__  # type: ignore[misc]

        @wraps(make)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            _check(cls.__name__, kwargs, known, instead)
            make(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate


def _check(owner: str, given: Mapping[str, object], known: tuple[str, ...], instead: Mapping[str, str]) -> None:
    for name in given:
        if name in known:
            continue
        near = get_close_matches(name, known, n=1)
        if name in instead:
            remedy = f"give {instead[name]}"
        elif near:
            remedy = f"did you mean {near[0]}?"
        else:
            remedy = f"it has {', '.join(known)}"
        raise TypeError(f"{owner} has no argument {name!r}; {remedy}")

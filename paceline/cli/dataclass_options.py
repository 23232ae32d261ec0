"""A command whose options are the fields of a dataclass, which thus is the one place of names, defaults and help.

A field's metadata may have: `help`, `names` (instead of one from the field's name), `choices`, `minimum`, `parse` (text
to value; raises ValueError), and `argument` (how the help calls it) for one that is an argument and no option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from inspect import Parameter, Signature
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

T = TypeVar("T")


class ManyValues(TyperCommand):
    """A command whose options with several values take them one after the other too: `--name a b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeated = {name for each in self.params if getattr(each, "multiple", False) for name in each.opts}
        return super().parse_args(ctx, _repeat(args, repeated))


def command_of(cls: type[T], run: Callable[..., None], more: Sequence[Parameter] = ()) -> Callable[..., None]:
    """Return the function of a command that makes a `cls` from its options and runs with it.

    `more` are parameters of the command that are no fields, which `run` gets as keyword arguments.
    """
    hints, names = get_type_hints(cls), [each.name for each in fields(cls)]  # type: ignore[arg-type] # a dataclass

    def command(**given: Any) -> None:
        values = {name: given.pop(name) for name in names}
        run(
            cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}), **given
        )

    parameters = [_parameter(each, hints[each.name]) for each in fields(cls)]  # type: ignore[arg-type]
    command.__signature__ = Signature([*parameters, *more])  # type: ignore[attr-defined] # read by typer
    command.__doc__ = run.__doc__
    return command


def keyword(name: str, annotation: Any, default: Any) -> Parameter:
    """Return a parameter for `command_of`; typer reads its annotation."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(field: Field[Any], kind: Any) -> Parameter:
    about = field.metadata
    settings: dict[str, Any] = {"help": about.get("help", "")}
    names = tuple(about.get("names", (f"--{field.name.replace('_', '-')}",)))
    default = ... if field.default is MISSING else field.default
    if "parse" in about:
        settings["parser"] = partial(_parsed, about["parse"])
        settings["metavar"] = "TEXT"
        default, kind = ("" if default == () else default), Any
    elif "choices" in about:
        kind = Literal[tuple(about["choices"])]
    elif get_origin(kind) is tuple:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        default = default if default is ... else list(default)
    if "argument" in about:
        argument = typer.Argument(default, metavar=about["argument"], **settings)
        return Parameter(field.name, Parameter.KEYWORD_ONLY, default=argument, annotation=kind)
    if "minimum" in about:
        settings["min"] = about["minimum"]
    made = typer.Option(default, *names, **settings)
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=made, annotation=kind)


def _parsed(parse: Callable[[str], object], text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _repeat(args: Sequence[str], names: set[str]) -> list[str]:
    """Write the name of an option again before its second and further values."""
    written, name = list[str](), ""
    for position, arg in enumerate(args):
        if arg.startswith("-"):
            name = arg if arg in names else ""
        elif name and args[position - 1] != name:
            written.append(name)
        written.append(arg)
    return written

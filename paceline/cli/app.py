"""The tree of commands, and what every command does with an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli import atropos, checkpoints, doctor, keys, logs, recipes, runs, sampling, status, trace, up, usage
from paceline.cli.output import CommandFailed, say
from paceline.errors import PacelineError
from paceline.extras import MissingExtra

RUN_IT, SEE_IT, KEEP_IT, TRAIN = "Run it", "See it", "Keep it", "Train"
_OPTIONS = {"help_option_names": ["-h", "--help"]}


class _Commands(TyperGroup):
    """Ends a command that fails with one sentence on standard error and status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (PacelineError, CommandFailed, MissingExtra, OSError) as failure:
            if isinstance(failure, BrokenPipeError):
                raise  # the reader of our output has gone; typer ends quietly
            say(str(failure) or type(failure).__name__)
            raise typer.Exit(1) from failure


def make_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(
        cls=_Commands,
        name="paceline",
        help="Fine-tune language models on your own machines.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=_OPTIONS,
    )
    app.callback()(_root)
    up.add_to(app, RUN_IT)
    doctor.add_to(app, RUN_IT)
    logs.add_to(app, RUN_IT)
    app.add_typer(keys.app, name="keys", rich_help_panel=RUN_IT)
    status.add_to(app, SEE_IT)
    usage.add_to(app, SEE_IT)
    sampling.add_to(app, SEE_IT)
    trace.add_to(app, SEE_IT)
    app.add_typer(runs.app, name="runs", rich_help_panel=KEEP_IT)
    app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel=KEEP_IT)
    recipes.add_to(app, TRAIN)
    atropos.add_to(app, TRAIN)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 after an error, 2 after wrong usage, 130 after Ctrl-C."""
    try:
        make_app()(list(sys.argv[1:] if arguments is None else arguments), prog_name="paceline")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"{__version__}\n")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass

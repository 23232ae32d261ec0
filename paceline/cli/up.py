"""`paceline up`: run the three services on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.dataclass_options import command_of, keyword
from paceline.cli.output import CommandFailed
from paceline.extras import needing
from paceline.up.plan import CannotStart, UpOptions


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the command."""
    until_eof = keyword(
        "until_eof", Annotated[bool, typer.Option("--until-eof", help="also end when standard input ends")], False
    )
    app.command("up", rich_help_panel=panel)(command_of(UpOptions, _up, [until_eof]))


def _up(options: UpOptions, *, until_eof: bool) -> None:
    """Run trainer, sampler and gateway on this machine until Ctrl-C."""
    with needing("up", "`paceline up`"):
        from paceline.up.run import up  # noqa: PLC0415
    try:
        up(options, until_eof=until_eof)
    except CannotStart as failure:
        raise CommandFailed(str(failure)) from failure

"""`paceline atropos`: train from an Atropos API server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.atropos.options import ELSEWHERE, Options
from paceline.atropos.trainer import AtroposTrainer, say
from paceline.cli.connect import Address, KeyFile, connected
from paceline.cli.dataclass_options import ManyValues, command_of, keyword
from paceline.cli.output import CommandFailed


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the command."""
    more = [
        keyword("address", Address, None),
        keyword("api_key_file", KeyFile, None),
        *(keyword(name.strip("-").replace("-", "_"), _refused(name), None) for name in ELSEWHERE),
    ]
    app.command("atropos", rich_help_panel=panel, cls=ManyValues)(command_of(Options, _train, more))


def _train(options: Options, *, address: str | None, api_key_file: Path | None, **_refused: None) -> None:
    """Train from an Atropos API server."""
    try:
        with connected(address, api_key_file) as service:
            AtroposTrainer(options, service, say).run()
    except ValueError as failure:
        raise CommandFailed(str(failure)) from failure


def _refused(name: str) -> Any:
    """Return the type of an option of the example trainer that is a setting of the services here."""

    def refuse(value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"{name} is a setting of Paceline's services: {ELSEWHERE[name]}")

    checked: Callable[[str | None], None] = refuse
    return Annotated[str | None, typer.Option(hidden=True, callback=checked)]

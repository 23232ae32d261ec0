"""`paceline sft`, `paceline dpo` and `paceline rl`: the recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from paceline import ServiceClient
from paceline.cli.connect import Address, KeyFile, connected
from paceline.cli.dataclass_options import ManyValues, command_of, keyword
from paceline.cli.output import CommandFailed
from paceline.extras import MissingExtra
from paceline.recipes.dpo import DpoOptions, dpo
from paceline.recipes.rl import RlOptions, rl
from paceline.recipes.sft import SftOptions, sft


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the commands."""
    _add(app, panel, "sft", SftOptions, sft, "Train on a file of conversations, or of prompts and completions.")
    _add(app, panel, "dpo", DpoOptions, dpo, "Train on pairs of a chosen and a rejected answer.")
    _add(app, panel, "rl", RlOptions, rl, "Train by reinforcement on the prompts and the reward of a Python file.")


def _add(
    app: typer.Typer,
    panel: str,
    name: str,
    options: type[Any],
    recipe: Callable[[ServiceClient, Any, Console], None],
    text: str,
) -> None:
    def run(options: Any, *, address: str | None, api_key_file: Path | None) -> None:
        try:
            with connected(address, api_key_file) as service:
                recipe(service, options, Console())
        except (ValueError, MissingExtra) as failure:
            raise CommandFailed(str(failure)) from failure

    more = [keyword("address", Address, None), keyword("api_key_file", KeyFile, None)]
    app.command(name, rich_help_panel=panel, cls=ManyValues, help=text)(command_of(options, run, more))

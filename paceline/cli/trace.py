"""`paceline trace`: what the services did during a run's last steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.tracing.command import trace as write_trace


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the command."""
    app.command("trace", rich_help_panel=panel)(trace)


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Each service's trace_file, or directories.")],
    run: Annotated[str, typer.Option(help="Id of the run; if not given, the one that stepped last.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="How many of its last steps.")] = 3,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json"),
) -> None:
    """Write what the services did during a run's last steps as a trace for Perfetto."""
    if status := write_trace(files, run=run, steps=steps, out=out):
        raise typer.Exit(status)

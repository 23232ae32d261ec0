"""`paceline logs`: what the services of a `paceline up` have written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Literal

import typer

from paceline.cli.output import AsJson, CommandFailed, show_json_line

SERVICES = ("trainer", "sampler", "gateway")
_POLL_SECONDS = 0.2


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the command."""
    app.command("logs", rich_help_panel=panel)(logs)


def logs(
    service: Annotated[
        Literal["trainer", "sampler", "gateway"] | None, typer.Argument(help="One service; all if not given.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines of each to begin with.")] = 50,
    state: Annotated[Path, typer.Option(help="Directory of the `paceline up`.")] = Path(".paceline"),
    as_json: AsJson = False,
) -> None:
    """Print what services of a `paceline up` have written."""
    names = (service,) if service else SERVICES
    found = [_Log(name, state / "logs" / f"{name}.log") for name in names]
    if not any(log.path.exists() for log in found):
        raise CommandFailed(f"{state / 'logs'} has no logs; name the --state directory of a `paceline up`")
    for log in found:
        for line in log.last(lines):
            _write(log.name, line, alone=service is not None, as_json=as_json)
    while follow:
        for log in found:
            for line in log.new():
                _write(log.name, line, alone=service is not None, as_json=as_json)
        time.sleep(_POLL_SECONDS)


class _Log:
    """The log of one service, which a restart replaces."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """Return the last lines; `new` goes on after them."""
        lines = list(self.new())
        return lines[len(lines) - min(count, len(lines)) :]

    def new(self) -> Iterator[str]:
        """Yield the whole lines that were written since, also to a new file of this name."""
        if self._file is None and self.path.exists():
            self._file = self.path.open("rb")
        if self._file is None:
            return
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if self.path.exists() and os.fstat(self._file.fileno()).st_ino != self.path.stat().st_ino:
            self._file.close()
            self._file, self._rest = None, b""


def _write(name: str, line: str, *, alone: bool, as_json: bool) -> None:
    if as_json:
        show_json_line({"service": name, "line": line})
    else:
        typer.echo(line if alone else f"{name:8}{line}")

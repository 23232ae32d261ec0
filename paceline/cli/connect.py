"""How a command finds the gateway: options, environment, or the `paceline up` of this directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline import RetryPolicy, ServiceClient, Timeouts, errors
from paceline.cli.output import CommandFailed, say
from paceline.client.connection import ADDRESS_VARIABLE, KEY_VARIABLE
from paceline.files.secret_files import read_secret
from paceline.layout import is_run_id
from paceline.types import Run

Address = Annotated[str | None, typer.Option(help=f"host:port of the gateway; else ${ADDRESS_VARIABLE}.")]
KeyFile = Annotated[Path | None, typer.Option("--api-key-file", help=f"File with the API key; else ${KEY_VARIABLE}.")]
"""A key itself is never an option: other users of a machine can read its command lines."""

LOCAL_KEY = Path(".paceline/api_key")
"""Key of a `paceline up` that was started in this directory."""


@contextmanager
def connected(address: str | None, key_file: Path | None, *, patient: bool = True) -> Iterator[ServiceClient]:
    """Yield a client of the gateway that these options, or the environment, name.

    One that is not `patient` says at once what does not answer, instead of trying again.
    """
    retry, timeouts = (None, None) if patient else (RetryPolicy(budget=0.0), Timeouts(query=10.0))
    with ServiceClient(address, _find_key(key_file), retry=retry, timeouts=timeouts) as service:
        yield service


def find_run(service: ServiceClient, named: str) -> Run:
    """Return the run with an id, or the only run with a name. Raises RunNotFound, CommandFailed if several have it."""
    if is_run_id(named):
        return service.get_run(named)
    found = [run for run in service.list_runs() if run.user_metadata.get("name") == named]
    if not found:
        raise errors.RunNotFound(f"no run has the name or id {named}; `paceline runs list` shows what there is")
    if len(found) > 1:
        ids = ", ".join(run.run_id for run in found)
        raise CommandFailed(f"{len(found)} runs have the name {named}; give the id of one of them: {ids}")
    return found[0]


def _find_key(key_file: Path | None) -> str | None:
    """Return the key that a file has; None if the client is to read the environment variable."""
    if key_file is None and KEY_VARIABLE not in os.environ and LOCAL_KEY.exists():
        key_file = LOCAL_KEY
        say(f"using the API key of {LOCAL_KEY}; set ${KEY_VARIABLE} or give --api-key-file for another one")
    if key_file is None:
        return None
    try:
        return read_secret(key_file)
    except ValueError as error:
        raise CommandFailed(f"{error}; give another file as --api-key-file") from error

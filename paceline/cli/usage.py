"""`paceline usage`: the tokens that runs have trained, of one tenant or, by the files of a volume, of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline import ServiceClient
from paceline.cli.connect import Address, KeyFile, connected
from paceline.cli.output import AsJson, CommandFailed, show_json, show_table
from paceline.cli.times import duration
from paceline.files.usage_files import Trained, read_usage
from paceline.trainer.v1 import trainer_service_pb2 as pb

_Row = tuple[str, Trained]


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the command."""
    app.command("usage", rich_help_panel=panel)(usage)


def usage(
    by: Annotated[Literal["run", "day"], typer.Option(help="What to sum up by.")] = "run",
    since: Annotated[str, typer.Option(help="How far back, such as 30d.")] = "30d",
    volume: Annotated[
        Path | None, typer.Option(help="The trainer's checkpoint_dir: show all tenants, by its files.")
    ] = None,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the tokens trained, by run or day."""
    first = (datetime.now(UTC) - timedelta(seconds=duration(since))).date().isoformat()
    if volume is not None:
        rows = _of_volume(volume, first)
    else:
        with connected(address, api_key_file) as service:
            tenant = service.whoami().tenant
            rows = [(tenant, one) for one in _of_tenant(service, first)]
    key: Callable[[Trained], str] = (lambda one: one.run_id) if by == "run" else (lambda one: one.day)
    tokens, passes = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], int](int)
    for tenant, one in rows:
        tokens[tenant, key(one)] += one.tokens
        passes[tenant, key(one)] += one.passes
    found = [(tenant, name, tokens[tenant, name], passes[tenant, name]) for tenant, name in sorted(tokens)]
    if as_json:
        names = ("tenant", by, "tokens_trained", "passes")
        show_json({"since": first, "usage": [dict(zip(names, row, strict=True)) for row in found]})
        return
    shown = [(tenant, name, f"{trained:,}", count) for tenant, name, trained, count in found]
    show_table(("tenant", by, ">tokens trained", ">passes"), shown, empty=f"nothing was trained since {first}")


def _of_volume(volume: Path, first: str) -> list[_Row]:
    if not (volume / "runs").is_dir():
        raise CommandFailed(f"{volume} is no checkpoint volume; give the trainer's checkpoint_dir")
    try:
        found = read_usage(volume)
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    return [(tenant, one) for tenant, listed in found.items() for one in listed if one.day >= first]


def _of_tenant(service: ServiceClient, first: str) -> Iterator[Trained]:
    transport, token = service.transport, ""
    while True:
        request = pb.GetUsageRequest(trained_since=first, page_size=1000, page_token=token)
        reply = transport.query(transport.trainer.GetUsage, request).result()
        yield from (Trained(one.day, one.run_id, one.tokens, one.passes, 0) for one in reply.trained)
        if not (token := reply.next_page_token):
            return

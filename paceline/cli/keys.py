"""`paceline keys`: list, add, rotate, expire and remove the API keys of a gateway's keys file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.output import AsJson, ago, say, show_json, show_table, until
from paceline.cli.times import duration
from paceline.files.api_keys import ApiKey, read_keys
from paceline.files.key_changes import add_key, expire_key, remove_key, rotate_key

app = typer.Typer(help="List, add, rotate, expire and remove API keys, where the keys file is.", no_args_is_help=True)

LOCAL_KEYS = Path(".paceline/keys.json")
"""Keys file of a `paceline up` that was started in this directory."""

KeysFile = Annotated[Path, typer.Option("--file", help="The gateway's keys file.")]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, for logs.")]
Lifetime = Annotated[str | None, typer.Option("--expires-in", help="When it expires, such as 90d.")]


@app.command("list")
def list_keys(file: KeysFile = LOCAL_KEYS, as_json: AsJson = False) -> None:
    """List the keys, with when they were made and expire."""
    keys = read_keys(file)
    if as_json:
        show_json([_described(key) for key in keys])
        return
    show_table(("name", "tenant", "made", "expires"), map(_row, keys), empty="no keys")


@app.command("add")
def add(
    name: KeyName,
    tenant: Annotated[str, typer.Option(help="Whose runs its holder sees.")],
    expires_in: Lifetime = None,
    file: KeysFile = LOCAL_KEYS,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once."""
    token = add_key(file, tenant, name, _lifetime(expires_in))
    _show_new(file, name, token, as_json=as_json)


@app.command("rotate")
def rotate(
    name: KeyName,
    grace: Annotated[str, typer.Option(help="How long the old key stays valid; 0 shuts it out at once.")] = "24h",
    expires_in: Lifetime = None,
    file: KeysFile = LOCAL_KEYS,
    as_json: AsJson = False,
) -> None:
    """Make a new key of the same name and print it, once; it lives as long as the old one was to."""
    stays = timedelta() if grace == "0" else timedelta(seconds=duration(grace))
    token = rotate_key(file, name, stays, _lifetime(expires_in))
    _show_new(file, name, token, as_json=as_json)


@app.command("expire")
def expire(
    name: KeyName,
    after: Annotated[str | None, typer.Option("--in", help="When, such as 7d; at once if not given.")] = None,
    never: Annotated[bool, typer.Option("--never", help="Have it expire no more.")] = False,
    file: KeysFile = LOCAL_KEYS,
    as_json: AsJson = False,
) -> None:
    """Set when a key expires; it stays listed."""
    if never and after is not None:
        raise typer.BadParameter("--in and --never exclude each other")
    seconds = None if never else timedelta() if after is None else timedelta(seconds=duration(after))
    ends = expire_key(file, name, seconds)
    if as_json:
        show_json({"name": name, "expires": ends})
    else:
        say(f"{name} expires {until(ends)}")


@app.command("remove")
def remove(name: KeyName, file: KeysFile = LOCAL_KEYS, as_json: AsJson = False) -> None:
    """Remove a key, and those of its name that still expire."""
    remove_key(file, name)
    if as_json:
        show_json({"removed": name})
    else:
        say(f"removed {name}")


def _lifetime(text: str | None) -> timedelta | None:
    return None if text is None else timedelta(seconds=duration(text))


def _show_new(file: Path, name: str, token: str, *, as_json: bool) -> None:
    """Print a new key, the only time that anybody can: alone on its line, for `> key`."""
    mine = [key for key in read_keys(file) if key.name == name]
    if as_json:
        show_json({**_described(mine[-1]), "key": token})
        return
    typer.echo(token)
    for key in mine[:-1]:
        say(f"the key before it expires {until(key.expires)}")
    say(f"{name} expires {until(mine[-1].expires)}; the key is not shown again")


def _described(key: ApiKey) -> dict[str, object]:
    expired = key.has_expired(datetime.now(UTC))
    return {"name": key.name, "tenant": key.tenant, "created": key.created, "expires": key.expires, "expired": expired}


def _row(key: ApiKey) -> tuple[str, ...]:
    ended = f"expired {ago(key.expires)}" if key.has_expired(datetime.now(UTC)) else until(key.expires)
    return key.name, key.tenant, ago(key.created) or "unknown", ended

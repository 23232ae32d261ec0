"""`paceline keys`: the API keys of a gateway's keys file, and the limits of their tenants."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.output import AsJson, ago, say, show_json, show_table, until
from paceline.cli.times import duration
from paceline.files.api_keys import ApiKey, read_keys
from paceline.files.key_changes import add_key, expire_key, remove_key, rotate_key
from paceline.files.tenants_file import change_limits, read_tenants
from paceline.requests.tenant_limits import SETTINGS

app = typer.Typer(help="Change API keys and tenants' limits, where the gateway's files are.", no_args_is_help=True)

LOCAL_KEYS = Path(".paceline/keys.json")
"""Keys file of a `paceline up` that was started in this directory."""

LOCAL_TENANTS = Path(".paceline/tenants.json")
"""Its tenants file."""

_NUMBER = re.compile(r"([0-9]{1,19})([kMGT]?)")
_TIMES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

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


@app.command("quota")
def quota(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    limits: Annotated[
        list[str] | None,
        typer.Argument(metavar="LIMIT...", help="QUOTA=NUMBER, such as runs=8 or volume_bytes=50G; QUOTA- removes it."),
    ] = None,
    file: Annotated[Path, typer.Option("--file", help="The gateway's tenants file.")] = LOCAL_TENANTS,
    as_json: AsJson = False,
) -> None:
    """Set or show a tenant's own limits; 0 means none, and those not set are the settings'."""
    changes, removed = _read_limits(limits or ())
    own = change_limits(file, tenant, changes, removed) if limits else read_tenants(file).get(tenant, {})
    if as_json:
        show_json({"tenant": tenant, "limits": own})
        return
    rows = [(name, own.get(name, ""), setting) for name, setting in SETTINGS.items()]
    show_table(("quota", ">limit", "without it"), rows)


def _read_limits(texts: Sequence[str]) -> tuple[dict[str, int], frozenset[str]]:
    changes, removed = dict[str, int](), set[str]()
    for text in texts:
        name, sets, value = text.partition("=")
        if sets and (found := _NUMBER.fullmatch(value)):
            changes[name] = int(found[1]) * _TIMES[found[2]]
        elif not sets and text.endswith("-"):
            removed.add(text[:-1])
        else:
            raise typer.BadParameter(f"{text!r} is neither QUOTA=NUMBER, such as volume_bytes=50G, nor QUOTA-")
    return changes, frozenset(removed)


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

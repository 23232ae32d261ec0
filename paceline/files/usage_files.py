"""The files in which a trainer keeps what tenants have trained: usage/<tenant>/<month>.json on the volume."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import layout
from paceline.files.regular_files import NotRegularFile, read_file
from paceline.rpc.identity import is_tenant

FOLDER = "usage"
_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}\.json")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run has trained on one day."""

    day: str
    """In UTC, such as 2026-01-31."""
    run_id: str
    tokens: int
    """Positions of the sequences of its passes with a gradient."""
    passes: int
    """Calls of ForwardBackward."""
    last_seq_id: int
    """The newest of these commands."""

    @property
    def key(self) -> str:
        """Place in lists, which are ordered by day."""
        return f"{self.day}/{self.run_id}"


def month_files(volume: Path) -> Iterator[tuple[str, Path]]:
    """Find the files on a volume, each with its tenant. Raises OSError."""
    for folder in (path for path in layout.entries(volume / FOLDER) if is_tenant(path.name)):
        yield from ((folder.name, path) for path in layout.entries(folder) if _MONTH.fullmatch(path.name))


def read_month(file: Path) -> list[Trained]:
    """Return what a tenant has trained in a month. Raises OSError, ValueError for a damaged file, which it names."""
    try:
        entries = json.loads(read_file(file))
        if not isinstance(entries, list):
            raise TypeError("it is no list")
        usage = [Trained(**entry) for entry in entries]
        for one in usage:
            if not (_DAY.fullmatch(one.day) and min(one.tokens, one.passes, one.last_seq_id) >= 0 and one.run_id):
                raise ValueError(f"no such count: {one}")
    except (ValueError, TypeError, RecursionError, NotRegularFile) as error:
        raise ValueError(f"{file} is damaged ({error})") from error
    return usage


def read_usage(volume: Path) -> Mapping[str, list[Trained]]:
    """Return what each tenant has trained, by the files on a volume. Raises OSError, ValueError as `read_month`."""
    found: dict[str, list[Trained]] = {}
    for tenant, file in month_files(volume):
        found.setdefault(tenant, []).extend(read_month(file))
    return found


def write_month(volume: Path, tenant: str, month: str, usage: Iterable[Trained]) -> None:
    """Replace a tenant's file of a month, such as 2026-01, durably. Raises DiskFull, OSError."""
    folder = volume / FOLDER / tenant
    folder.mkdir(parents=True, exist_ok=True)
    fields = Trained.__slots__
    entries = [{name: getattr(one, name) for name in fields} for one in sorted(usage, key=lambda one: one.key)]
    with layout.new_file(folder / f"{month}.json") as file:
        file.write(json.dumps(entries).encode())

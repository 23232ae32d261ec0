"""Add rows to docs/track-record.csv."""

from __future__ import annotations

import csv
import io
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from bench import ROOT

RECORD = ROOT / "docs" / "track-record.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one run of a test did and found, without its date and its commit. The order of fields is the file's."""

    test: str
    """As in earlier rows: chaos, power cuts or fuzz."""
    amount: str
    """Such as `1000 at 28 points`."""
    other_faults: str = ""
    """How many faults of other kinds there were, by kind."""
    commands: str = ""
    samples: str = ""
    network_faults: str = ""
    seconds_each: str
    """Seconds per kill or cut."""
    found: str
    """`nothing`, or how many differences and the first of them."""
    command: str
    """What repeats it."""
    remarks: str = ""


def commit() -> str:
    """Return the short hash of the checked-out commit, with "-dirty" if tracked files other than the record differ."""
    is_dirty = _git("diff", "--quiet", "HEAD", "--", ".", f":!{RECORD.relative_to(ROOT)}").returncode == 1
    return _git("rev-parse", "--short", "HEAD").stdout.strip() + ("-dirty" if is_dirty else "")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def add_row(row: Row) -> str:
    """Append a row with today's date and the commit; return its line."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([f"{datetime.now(UTC):%Y-%m-%d}", commit(), *asdict(row).values()])
    with RECORD.open("a") as file:
        file.write(line.getvalue())
    return line.getvalue()

"""Add rows to docs/track-record.md."""

from __future__ import annotations

import subprocess

from bench import ROOT

RECORD = ROOT / "docs" / "track-record.md"


def commit() -> str:
    """Return the short hash of the checked-out commit."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip()


def add_row(section: str, row: str) -> None:
    """Add a row, which ends with a newline, to the first table below the heading `section`."""
    lines = RECORD.read_text().splitlines(keepends=True)
    begin = lines.index(f"## {section}\n")
    first = next(index for index in range(begin, len(lines)) if lines[index].startswith("|"))
    end = next((index for index in range(first, len(lines)) if not lines[index].startswith("|")), len(lines))
    lines.insert(end, row)
    RECORD.write_text("".join(lines))

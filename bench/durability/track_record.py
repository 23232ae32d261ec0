"""Add rows to docs/track-record.md."""

from __future__ import annotations

import subprocess

from bench import ROOT

RECORD = ROOT / "docs" / "track-record.md"


def commit() -> str:
    """Return the short hash of the checked-out commit, with "-dirty" if tracked files other than the record differ."""
    is_dirty = _git("diff", "--quiet", "HEAD", "--", ".", f":!{RECORD.relative_to(ROOT)}").returncode == 1
    return _git("rev-parse", "--short", "HEAD").stdout.strip() + ("-dirty" if is_dirty else "")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def add_row(section: str, row: str) -> None:
    """Add a row, which ends with a newline, to the first table below the heading `section`."""
    lines = RECORD.read_text().splitlines(keepends=True)
    begin = lines.index(f"## {section}\n")
    first = next(index for index in range(begin, len(lines)) if lines[index].startswith("|"))
    end = next((index for index in range(first, len(lines)) if not lines[index].startswith("|")), len(lines))
    lines.insert(end, row)
    RECORD.write_text("".join(lines))

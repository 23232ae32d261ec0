"""SHA256SUMS, in a directory that is moved and copied as a whole. `sha256sum -c` checks it, too."""

from __future__ import annotations

from pathlib import Path

from paceline import weights

SUMS_FILE = "SHA256SUMS"


def write_sums(directory: Path) -> None:
    """Write the SHA-256 of every file of `directory` beside them."""
    sums = "".join(f"{weights.hash_file(path)}  {path.name}\n" for path in sorted(directory.iterdir()))
    (directory / SUMS_FILE).write_text(sums)


def find_damaged(directory: Path) -> str | None:
    """Return the name of a file that is not what it was when the sums were written; None when all are.

    Raises FileNotFoundError when one is gone, or the sums are.
    """
    for line in (directory / SUMS_FILE).read_text().splitlines():
        digest, _, name = line.partition("  ")
        if weights.hash_file(directory / Path(name).name) != digest:
            return name
    return None

"""Write docs/files.md: every file of the four packages, by folder, with the first line of its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "files.md"
PACKAGES = ("gateway", "paceline", "sampler_service", "trainer_service")

_HEAD = """# Files

Every file of the four packages, with the first line of its docstring. [Architecture](architecture.md) tells how they
work together. `make files` writes this page.
"""


def file_index() -> str:
    """Return the page. Raises ValueError for a file without a docstring."""
    parts = [_HEAD]
    for folder, files in groupby(_files(), key=lambda file: file.parent):
        rows = [f"| [`{file.name}`](../{file.relative_to(ROOT)}) | {_first_line(file)} |" for file in files]
        parts.append("\n".join([f"## {folder.relative_to(ROOT)}/\n", "| file | what it is |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _files() -> Iterator[Path]:
    for package in PACKAGES:
        found = sorted((ROOT / package).rglob("*.py"), key=lambda file: (file.parent, file.name))
        yield from (file for file in found if file.name != "__init__.py" and not _is_generated(file))


def _is_generated(file: Path) -> bool:
    return file.parent.name == "v1"


def _first_line(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    if not docstring:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring")
    return docstring.partition("\n")[0].replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(file_index())

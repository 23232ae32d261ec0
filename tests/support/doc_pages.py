"""Read the pages of docs/: sections, tables, and defaults as the tables show them."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    """Return the text of a page of docs/."""
    return (ROOT / "docs" / name).read_text()


def section(text: str, heading: str) -> str:
    """Return the text between a heading and the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading}"
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells after the first of a text's table rows, by the code in the first."""
    lines = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `"))
    return {first.strip("` |"): [cell.strip("` |") for cell in rest] for first, *rest in lines}


def shown(default: object) -> str:
    """Format a default as the tables do."""
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    return {"None": "unset", "": "empty"}.get(text, text)

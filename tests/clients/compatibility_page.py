"""The table of docs/compatibility.md: the outcome of every call of Tinker's SDK, by release."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
_BEGIN, _END = "<!-- table: written by `make test-clients` -->\n", "<!-- end of the table -->\n"

Outcomes = Mapping[str, str]
"""Outcome by call: works, absent, or the error that it was refused with."""


def render(by_release: Mapping[str, Outcomes]) -> str:
    """Return the table in Markdown, releases in order."""
    releases = sorted(by_release, key=lambda release: tuple(map(int, release.split("."))))
    minors = [".".join(release.split(".")[:2]) for release in releases]
    calls = list(dict.fromkeys(call for release in reversed(releases) for call in by_release[release]))
    lines = ["| call | " + " | ".join(minors) + " |", "|---|" + "---|" * len(minors)]
    for call in calls:
        cells = [mark(by_release[release].get(call, "absent")) for release in releases]
        lines.append(f"| {call} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_notes(by_release), ""])


def mark(outcome: str) -> str:
    """Return the sign for an outcome."""
    return {"works": "✓", "absent": "–"}.get(outcome, "✗")


def _notes(by_release: Mapping[str, Outcomes]) -> list[str]:
    """Return a note for each ✗, by call, with the outcome in the newest release that has it."""
    refusals = {
        call: outcome
        for outcomes in by_release.values()
        for call, outcome in outcomes.items()
        if outcome not in {"works", "absent"}
    }
    return [f"- ✗ {call}: {outcome.removeprefix('refused: ')}" for call, outcome in refusals.items()]


def read() -> str:
    """Return the page's table."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].strip("\n") + "\n"


def write(table: str) -> None:
    """Write a table into the page."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{rest.partition(_END)[2]}")


def column(minor: str) -> dict[str, str]:
    """Return a release's column of the page, by call: ✓, – or ✗."""
    rows = [line.strip("|").split("|") for line in read().splitlines() if line.startswith("|")]
    place = [cell.strip() for cell in rows[0]].index(minor)
    return {row[0].strip(): row[place].strip() for row in rows[2:]}

"""docs/models.md states for every architecture what the engine's certificate finds."""

from __future__ import annotations

import pytest
from models_table import DOCUMENT, Row, row_of, rows_in, written
from tiny_architectures import ARCHITECTURES

from paceline.types import PackingMode

ROWS = rows_in(DOCUMENT.read_text())
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_the_table_is_what_the_engine_finds(part):
    for kind in ARCHITECTURES[part::PARTS]:
        row = row_of(kind)
        assert str(row or "") == ROWS.get(kind, ""), f"{kind}: run `make models`"


def test_most_architectures_are_served_and_what_is_refused_has_a_sentence():
    served = [line for line in ROWS.values() if "| refused |  |  |  |" not in line]
    assert len(ROWS) >= 40
    assert len(served) >= 0.9 * len(ROWS)
    for line in ROWS.values():
        assert "| packed |" in line or line.rstrip().endswith(". |")


def test_a_table_is_put_in_the_place_of_the_one_before():
    document = DOCUMENT.read_text()
    again = written(document, [Row("llama", None, "No.")])
    assert rows_in(again) == {"llama": "| `llama` | refused |  |  |  | No. |\n"}
    assert written(again, []) == written(document, [])
    assert PackingMode.PACKED.name.lower() in document

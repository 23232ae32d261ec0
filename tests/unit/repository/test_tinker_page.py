"""docs/tinker.md compares the names of Tinker's client with ours, as both packages have them.

UPDATE=1 writes the table again.
"""

from __future__ import annotations

import os
import re

from support.stacks.deploy_files import ROOT
from support.tinker_names import INSTEAD, has, table, told

import paceline

PAGE = ROOT / "docs" / "tinker.md"
START = "<!-- The table is written by tests/unit/repository/test_tinker_page.py. -->\n"


def test_the_table_is_what_the_packages_have():
    text, _, old = PAGE.read_text().partition(START)
    if os.environ.get("UPDATE"):
        PAGE.write_text(f"{text}{START}{table()}")
    else:
        assert old == table()


def test_every_name_of_tinkers_is_the_same_or_explained_and_no_explanation_is_stale():
    rows = dict(told())
    assert [name for name, ours in rows.items() if ours == "?"] == []
    assert INSTEAD.keys() <= rows.keys()


def test_what_explanations_name_exists():
    for text in INSTEAD.values():
        for cls, name in re.findall(r"`(\w+)\.(\w+)[`(]", text):
            assert has(getattr(paceline, cls), name) or (cls, name) == ("TrainingClient", "run_id"), text

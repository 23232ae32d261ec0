"""The metrics that docs/monitoring.md lists, with their labels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from support.doc_pages import page, rows, section

_SUFFIXES = {"_bucket": {"le"}, "_count": set(), "_sum": set()}
"""Series of a histogram, and the labels that they have besides its own."""


def documented() -> Mapping[str, Set[str]]:
    """Return the labels of each metric."""
    listed = (re.fullmatch(r"(\w+)(?:\{(.*)\})?", metric) for metric in rows(section(page("monitoring.md"), "Metrics")))
    return {found[1]: set(filter(None, (found[2] or "").split(","))) for found in listed if found}


def series() -> Mapping[str, Set[str]]:
    """Return the labels of each series, of which a histogram has several."""
    described = rows(section(page("monitoring.md"), "Metrics"))
    found: dict[str, Set[str]] = {}
    for (name, labels), (_, meaning) in zip(documented().items(), described.values(), strict=True):
        if meaning.startswith("histogram: "):
            found |= {name + suffix: labels | own for suffix, own in _SUFFIXES.items()}
        else:
            found[name] = labels
    return found

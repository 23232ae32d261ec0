"""Extras of the distribution: what is said when a package is missing that only an extra installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ImportError):
    """A package is not installed. The message names who needs it and the extra that installs it."""


@contextmanager
def needing(extra: str, who: str) -> Iterator[None]:
    """Import, within the block, packages of an extra that `who` needs. Raises MissingExtra if one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in {"", "paceline", "gateway", "trainer_service", "sampler_service"}:
            raise  # A fault of ours, which no installation mends.
        message = f"{who} needs {missing}, which is not installed: pip install 'paceline[{extra}]'"
        raise MissingExtra(message, name=error.name) from error

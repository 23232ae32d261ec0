"""Names the packages that a command lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.cli.output import CommandFailed

_OURS = ("paceline", "gateway", "trainer_service", "sampler_service")


@contextmanager
def needing(extra: str, command: str) -> Iterator[None]:
    """Say which extra `command` needs if a package that the block imports is not installed. Raises CommandFailed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        message = f"`paceline {command}` needs pip install 'paceline[{extra}]': {error.name} is not installed"
        raise CommandFailed(message) from error

"""Availability of the base weights that a sampler lends to the engine (bridge `shared`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.errors import BaseUnavailable
from paceline.log import get_logger
from paceline.weight_sharing import is_lent, read_base

_LOOK_SECONDS = 0.5
"""Interval at which the sampler's lock is polled: a lock that is released by its holder's death causes no event."""

_log = get_logger(__name__)


class LentBase:
    """Tracks the weights that the engine was started on. Without a directory it has its own, which never disappear."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._generation = ""
        self._is_borrowed = False

    async def available(self) -> None:
        """Wait until there are weights to start the engine on. Raises BaseMismatch if the directory is not usable."""
        waited = False
        while self._directory is not None:
            try:
                manifest = await asyncio.to_thread(read_base, self._directory)
                self._generation, self._is_borrowed = manifest.generation, not manifest.writable
                return
            except BaseUnavailable as error:
                if not waited:
                    _log.warning("waiting for base weights", reason=error.reason, error=error.message)
                waited = True
            await asyncio.sleep(_LOOK_SECONDS)

    async def gone(self) -> None:
        """Wait until the weights that `available` found last, which the engine computes with, are gone or replaced."""
        while not self._is_borrowed or await self._is_there():  # noqa: ASYNC110 - file locks must be polled
            await asyncio.sleep(_LOOK_SECONDS)

    async def _is_there(self) -> bool:
        return self._directory is None or await asyncio.to_thread(is_lent, self._directory, self._generation)

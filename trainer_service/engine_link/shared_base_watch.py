"""Watch the base weights that a sampler lends (bridge `shared`): the engine starts and ends with the sampler."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline import errors
from paceline.base_model.weight_sharing import is_lent, read_base
from paceline.log import get_logger

_log = get_logger(__name__)

_POLL_SECONDS = 0.5
"""Interval at which the sampler's lock is polled: a lock that is released by its holder's death causes no event."""


class SharedBaseWatch:
    """Tracks the weights that the engine was started on. Without a directory it has its own, which never disappear."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._generation = ""
        self._is_borrowed = False

    async def wait_available(self) -> None:
        """Wait until there are weights to start the engine on. Raises BaseMismatch if the directory is not usable."""
        waited = False
        while self._directory is not None:
            try:
                manifest = await asyncio.to_thread(read_base, self._directory)
                self._generation, self._is_borrowed = manifest.generation, not manifest.writable
                return
            except errors.BaseUnavailable as error:
                if not waited:
                    _log.warning("waiting for base weights", reason=error.reason, error=error.message)
                waited = True
            await asyncio.sleep(_POLL_SECONDS)

    async def wait_gone(self) -> None:
        """Wait until the weights that `wait_available` found last, which the engine uses, are gone or replaced."""
        while not self._is_borrowed or await self._is_available():  # noqa: ASYNC110 - file locks must be polled
            await asyncio.sleep(_POLL_SECONDS)

    async def _is_available(self) -> bool:
        return self._directory is None or await asyncio.to_thread(is_lent, self._directory, self._generation)

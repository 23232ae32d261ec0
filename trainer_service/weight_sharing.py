"""Whether the sampler whose base weights the engine uses is there (bridge `shared`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.errors import BaseUnavailable
from paceline.log import get_logger
from paceline.weight_sharing.export import is_lent, read_base

_LOOK_SECONDS = 0.5
"""Between looks at the sampler's lock; a lock that its holder's death gives back has no events."""

_log = get_logger(__name__)


class LentBase:
    """Knows which weights the engine was started on. Without a directory the engine has its own, which never go."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._generation = ""
        self._is_borrowed = False

    async def available(self) -> None:
        """Return when there are weights to start the engine on. Raises BaseMismatch when what is there is none."""
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
        """Return when the weights that were there last, and that the engine computes with, are gone or others."""
        while not self._is_borrowed or await self._is_there():  # noqa: ASYNC110 - a lock of files
            await asyncio.sleep(_LOOK_SECONDS)

    async def _is_there(self) -> bool:
        return self._directory is None or await asyncio.to_thread(is_lent, self._directory, self._generation)

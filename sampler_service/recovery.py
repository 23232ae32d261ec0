"""Keeps the engine alive: one that dies is built anew inside the living service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from paceline import errors
from paceline.log import get_logger
from sampler_service.engine.restartable import RebuildingEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import Versions

_HEALTH_SECONDS = 1.0
"""How often the engine is asked whether it lives."""

_PROVEN_SECONDS = 60.0
"""An engine that lived for so long did not die of how it was built: the count of attempts begins anew."""

_MOST_SECONDS = 8.0
"""Longest wait before another attempt. What the dead engine left, such as a GPU's memory, may take a while to go."""

_log = get_logger(__name__)


class EngineKeeper:
    """Builds the engine anew when it dies, with its versions. The service is not ready meanwhile."""

    def __init__(
        self,
        engine: RebuildingEngine,
        versions: Versions,
        set_ready: Callable[[bool], Awaitable[None]],
        most_attempts: int,
        metrics: SamplerMetrics,
    ) -> None:
        """Take how often in a row it is tried, and what says whether the service can do its work."""
        self._engine = engine
        self._versions = versions
        self._set_ready = set_ready
        self._most_attempts = most_attempts
        self._metrics = metrics

    async def run(self) -> None:
        """Watch for ever. Raises EngineUnavailable when the engine died and did not stay up for any attempt."""
        clock = asyncio.get_running_loop().time
        attempts, built, reason = 0, clock(), ""
        while True:
            death = await self._death()
            if clock() - built > _PROVEN_SECONDS:
                attempts = 0
            if attempts >= self._most_attempts:
                raise errors.EngineUnavailable(
                    f"the engine died; building it anew {attempts} times did not help{reason}"
                )
            attempts += 1
            _log.error("engine died; it is built anew", reason=str(death), attempt=attempts)
            await self._set_ready(False)
            await asyncio.sleep(min(2.0 ** (attempts - 1) - 1, _MOST_SECONDS))
            reason = await self._revive()
            built = clock()

    async def _death(self) -> errors.EngineUnavailable:
        while True:
            try:
                await self._engine.check_health()
            except errors.EngineUnavailable as error:
                return error
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _revive(self) -> str:
        """Build the engine anew; return why that did not work, to put it at a sentence's end, empty if it did."""
        try:
            lost = await self._engine.revive()
        except Exception as error:
            _log.exception("engine not built")
            return f": {error}" if isinstance(error, errors.PacelineError) else ""
        # Nothing is awaited between the engine's first breath and here.
        self._versions.revived(lost)
        self._metrics.engine_restarts.inc()
        _log.info("engine built anew", versions=len(self._versions))
        await self._set_ready(not self._engine.is_changing_model)
        return ""

"""Restarts an engine that dies, inside the running service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from paceline import errors
from paceline.log import get_logger
from sampler_service.engine.liveness import HEALTH_SECONDS
from sampler_service.engine.restartable import RestartableEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import Versions

_PROVEN_SECONDS = 60.0
"""An engine that ran longer than this did not die because of how it was built; the count of attempts starts over."""

_MOST_SECONDS = 8.0
"""Longest wait before another attempt. Freeing the dead engine's resources, such as GPU memory, may take a while."""

_log = get_logger(__name__)


class EngineKeeper:
    """Restarts the engine with its versions when it dies. Meanwhile the service is not ready."""

    def __init__(
        self,
        engine: RestartableEngine,
        versions: Versions,
        set_ready: Callable[[bool], Awaitable[None]],
        most_attempts: int,
        metrics: SamplerMetrics,
    ) -> None:
        """`most_attempts` bounds consecutive attempts; `set_ready` sets the service's readiness."""
        self._engine = engine
        self._versions = versions
        self._set_ready = set_ready
        self._most_attempts = most_attempts
        self._metrics = metrics

    async def run(self) -> None:
        """Watch the engine until cancelled. Raises EngineUnavailable if it died and no attempt kept it running."""
        clock = asyncio.get_running_loop().time
        attempts, built, reason = 0, clock(), ""
        while True:
            death = await self._death()
            if clock() - built > _PROVEN_SECONDS:
                attempts = 0
            if attempts >= self._most_attempts:
                raise errors.EngineUnavailable(f"the engine died; restarting it {attempts} times did not help{reason}")
            attempts += 1
            _log.error("engine died; restarting it", reason=str(death), attempt=attempts)
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
            await asyncio.sleep(HEALTH_SECONDS)

    async def _revive(self) -> str:
        """Restart the engine; return "" or, if it failed, the reason, formatted to be appended to a sentence."""
        try:
            lost = await self._engine.revive()
        except Exception as error:
            _log.exception("engine not restarted")
            return f": {error}" if isinstance(error, errors.PacelineError) else ""
        # No await since the engine came back, so no request has used it before its versions are updated.
        self._versions.revived(lost)
        self._metrics.engine_restarts.inc()
        _log.info("engine restarted", versions=len(self._versions))
        await self._set_ready(not self._engine.is_changing_model)
        return ""

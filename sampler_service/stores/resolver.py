"""Resolves a request's model to exact weights: a run's newest version, or a checkpoint's current content."""

from __future__ import annotations

from paceline.types import ModelRef
from paceline.weights import served_model
from sampler_service.transports.base import Bridge
from sampler_service.transports.version_keys import VersionKey


class VersionResolver:
    """Tracks the newest version of every run: the one that the trainer announced last, or one pushed after that.

    A pushed number, however high, is the newest only until the trainer's next version.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._newest: dict[str, int] = {}
        self._announced: dict[str, int] = {}
        """Highest version of each run that this trainer announced."""
        self._trainer = ""

    def welcomed(self, trainer_instance: str) -> None:
        """Record which trainer instance announces from now on. A new one's numbers may be lower and are still valid."""
        if trainer_instance != self._trainer:
            self._trainer = trainer_instance
            self._announced.clear()

    def announced(self, run_id: str, version: int) -> None:
        """Record that the trainer announced a version."""
        if version > self.last_announced(run_id):
            self._announced[run_id] = self._newest[run_id] = version

    def pushed(self, run_id: str, version: int) -> None:
        """Record that a version was pushed, which the trainer did not announce."""
        self._newest[run_id] = max(version, self.newest(run_id))

    def newest(self, run_id: str) -> int:
        """Return the newest known version; 0 if there is none."""
        return self._newest.get(run_id, 0)

    def last_announced(self, run_id: str) -> int:
        """Return the highest version that this trainer announced; 0 if it announced none."""
        return self._announced.get(run_id, 0)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._newest.pop(run_id, None)
        self._announced.pop(run_id, None)

    async def resolve(self, ref: ModelRef, tenant: str) -> VersionKey:
        """Return the key of the exact weights that `ref` names.

        The bridge is asked for what announcements do not tell: the newest version of an unknown run, and the content of
        a checkpoint, which may have been overwritten or deleted. Raises as `Bridge.describe`.
        """
        if ref.run_id and ref.version is not None:
            return VersionKey(run_id=ref.run_id, version=ref.version)
        if newest := self.newest(ref.run_id):
            return VersionKey(run_id=ref.run_id, version=newest)
        return VersionKey.of(served_model(await self._bridge.describe(ref, tenant)))

"""Which weights a request means: the newest version of a run, or the content that a checkpoint has now."""

from __future__ import annotations

from paceline.types import ModelRef
from paceline.weights import served_model
from sampler_service.transports.base import Bridge
from sampler_service.transports.version_keys import VersionKey


class VersionResolver:
    """Knows the newest version of every run: what the trainer announced last, or what was pushed after that.

    A number that was pushed from elsewhere, however high, is the newest until the trainer's next version.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._newest: dict[str, int] = {}
        self._announced: dict[str, int] = {}
        """Highest version of each run that this trainer announced."""
        self._trainer = ""

    def welcomed(self, trainer_instance: str) -> None:
        """Note which trainer announces from here on: the numbers of another one may be lower, and are right."""
        if trainer_instance != self._trainer:
            self._trainer = trainer_instance
            self._announced.clear()

    def announced(self, run_id: str, version: int) -> None:
        """Note that the trainer says that a version exists."""
        if version > self.last_announced(run_id):
            self._announced[run_id] = self._newest[run_id] = version

    def pushed(self, run_id: str, version: int) -> None:
        """Note that a version came that the trainer did not announce."""
        self._newest[run_id] = max(version, self.newest(run_id))

    def newest(self, run_id: str) -> int:
        """Return the newest version that is known of; 0 when none is."""
        return self._newest.get(run_id, 0)

    def last_announced(self, run_id: str) -> int:
        """Return the highest version that this trainer announced; 0 when it announced none."""
        return self._announced.get(run_id, 0)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._newest.pop(run_id, None)
        self._announced.pop(run_id, None)

    async def resolve(self, ref: ModelRef, tenant: str) -> VersionKey:
        """Return the exact weights that `ref` means.

        What no announcement told is asked through the bridge: the newest version of a run that is not known here, and
        what a checkpoint holds, which may have been overwritten or deleted. Errors as `Bridge.describe`.
        """
        if ref.run_id and ref.version is not None:
            return VersionKey(run_id=ref.run_id, version=ref.version)
        if newest := self.newest(ref.run_id):
            return VersionKey(run_id=ref.run_id, version=newest)
        return VersionKey.of(served_model(await self._bridge.describe(ref, tenant)))

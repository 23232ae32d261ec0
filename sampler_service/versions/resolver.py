"""Which weights a request means: the newest version of a run, or the content that a checkpoint has now."""

from __future__ import annotations

from paceline.types import ModelRef
from paceline.weights import served_model
from sampler_service.versions.bridges import Bridge
from sampler_service.versions.keys import VersionKey


class VersionResolver:
    """Knows the newest announced version of every run."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._newest: dict[str, int] = {}

    def announced(self, run_id: str, version: int) -> None:
        """Note that a version exists."""
        self._newest[run_id] = max(version, self.newest(run_id))

    def newest(self, run_id: str) -> int:
        """Return the newest version that was announced; 0 when none was."""
        return self._newest.get(run_id, 0)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._newest.pop(run_id, None)

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

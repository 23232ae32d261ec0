"""Checks free disk space before anything is written, so that a full disk is noticed before a run changes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline import errors
from trainer_service.limits.volume_bytes import VolumeBytes


@dataclass(frozen=True, slots=True)
class DiskGuard:
    """Refuses work that would leave less than `min_free_bytes` on the checkpoint volume, and counts what is written."""

    min_free_bytes: int
    volume_bytes: VolumeBytes | None = None
    """Counter of bytes by tenant; None if nothing is counted."""

    def measure(self, path: Path) -> None:
        """Update the count of a part of a run's folder that was written or removed."""
        if self.volume_bytes is not None:
            self.volume_bytes.measure(path)

    def check(self, directory: Path, size: int, retry_after: float | None = None) -> None:
        """Raise DiskFull, with the free and needed bytes, unless `size` bytes fit below the existing `directory`."""
        free = shutil.disk_usage(directory).free
        needed = size + self.min_free_bytes
        if free < needed:
            message = (
                f"{free} bytes are free on the checkpoint volume and {needed} are needed, "
                f"{self.min_free_bytes} of which stay free (min_free_bytes); delete checkpoints or grow it"
            )
            facts = {"free_bytes": str(free), "needed_bytes": str(needed)}
            raise errors.DiskFull(message, metadata=facts, retry_after=retry_after)


NO_GUARD = DiskGuard(0)
"""Refuses only what does not fit, and counts nothing."""

"""Free disk space, and the number of bytes that each tenant has on the checkpoint volume.

Space is checked before anything is written, so that a full disk is noticed before a run changes.

A tenant's bytes are counted once at startup. After that, an entry is measured whenever it gets or loses its name: a
checkpoint, a version, a snapshot, a journal segment, or a loaded checkpoint that is kept for replay (even where it
shares its bytes with the original). A run's metrics and rollouts are measured whenever they grow. Each measurement
replaces the previous one. A checkpoint counts as long as it exists, even after its run is deleted. run.json and its
copy do not count.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from paceline import errors, layout
from paceline.log import get_logger
from paceline.requests.tenant_limits import TenantLimits
from trainer_service.volume_files import tenant_of

_log = get_logger(__name__)

QUOTA = "volume_bytes"
"""Name of the quota on bytes on the volume."""


class Reservation:
    """Bytes that a tenant is about to write: they count as its own until they are released.

    Who makes one releases it, unless it is given to something that says that it takes it.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.is_released = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Count the bytes no longer: they are measured where they were written, or are not written. Idempotent."""
        if not self.is_released:
            self.is_released = True
            self._release()


class DiskGuard:
    """Refuses work for which the checkpoint volume, or its tenant's share of it, is too full. Thread-safe."""

    def __init__(
        self,
        min_free_bytes: int = 0,
        volume: layout.Volume | None = None,
        tenant_limit: int | None = 0,
        tenants: TenantLimits | None = None,
    ) -> None:
        """Keep `min_free_bytes` free. Without `volume`, tenants' bytes are not counted.

        `tenant_limit` is the most bytes that a tenant may have: None means half of the volume's capacity, 0 no limit.
        `tenants` may have limits of their own.
        """
        self._tenants = TenantLimits() if tenants is None else tenants
        self.limit = tenant_limit or 0
        self._is_half = tenant_limit is None
        self._min_free_bytes = min_free_bytes
        self._runs = volume.runs if volume is not None else None
        self._lock = threading.Lock()
        self._owners: dict[str, str] = {}
        self._sizes: dict[str, dict[str, int]] = {}
        """Sizes by run, and by path in the run's folder."""
        self._by_tenant: Counter[str] = Counter()

    def check_free(self, directory: Path, size: int, retry_after: float | None = None) -> None:
        """Raise DiskFull, with the free and needed bytes, unless `size` bytes fit below the existing `directory`."""
        free = shutil.disk_usage(directory).free
        needed = size + self._min_free_bytes
        if free < needed:
            message = (
                f"{free} bytes are free on the checkpoint volume and {needed} are needed, "
                f"{self._min_free_bytes} of which must stay free (min_free_bytes); delete checkpoints or grow it"
            )
            metadata = {"free_bytes": str(free), "needed_bytes": str(needed)}
            raise errors.DiskFull(message, metadata=metadata, retry_after=retry_after)

    def check_quota(self, tenant: str, size: int) -> None:
        """Raise QuotaExceeded unless a tenant may have `size` more bytes."""
        used, limit = self._by_tenant[tenant], self.limit_of(tenant)
        if limit and used + size > limit:
            raise errors.QuotaExceeded(
                f"this tenant has {used} bytes on the checkpoint volume and this needs up to {size}; at most "
                f"{limit} are allowed: delete checkpoints or runs, set a TTL on checkpoints, or have the operator "
                f"raise {self._tenants.raised_by(tenant, QUOTA)}",
                metadata={"quota": QUOTA, "used": str(used), "limit": str(limit), "needed": str(size)},
            )

    def limit_of(self, tenant: str) -> int:
        """Return the most bytes that a tenant may have; 0 means no limit."""
        return self._tenants.of(tenant, QUOTA, self.limit)

    def reserve(self, tenant: str, size: int, replaced: Path | None = None) -> Reservation:
        """Reserve `size` bytes for what is to be written, in place of `replaced` if given. Raises QuotaExceeded."""
        size -= min(size, size_of(replaced)) if replaced is not None else 0
        with self._lock:
            self.check_quota(tenant, size)
            self._by_tenant[tenant] += size
        return Reservation(lambda: self._release(tenant, size))

    def run_bytes(self, run_id: str) -> int:
        """Return the bytes that a run has on the volume."""
        with self._lock:
            return sum(self._sizes.get(run_id, {}).values())

    def volume(self) -> tuple[int, int]:
        """Return the free bytes and the size of the volume; zeros if it cannot be asked."""
        if self._runs is None:
            return 0, 0
        try:
            usage = shutil.disk_usage(self._runs.parent)
        except OSError:
            return 0, 0
        return usage.free, usage.total

    def used(self, tenant: str) -> int:
        """Return the bytes that a tenant has, including those that it is about to write."""
        return self._by_tenant[tenant]

    def _release(self, tenant: str, size: int) -> None:
        with self._lock:
            self._by_tenant[tenant] -= size

    def tenants(self) -> list[str]:
        """Return the tenants that have bytes on the volume."""
        with self._lock:
            return [tenant for tenant, size in self._by_tenant.items() if size]

    def count_all(self) -> None:
        """Count everything on the volume, after startup has cleaned up what a crash interrupted."""
        if self._runs is None:
            return
        if self._is_half:
            self.limit = shutil.disk_usage(self._runs.parent).total // 2
        for folder in layout.run_folders(self._runs):
            try:
                self.count(folder.name)
            except OSError as error:
                _log.error("a run's bytes cannot be counted; counting none", run=folder.name, error=str(error))

    def count(self, run_id: str) -> None:
        """Recount a run's folder; a missing folder counts as nothing."""
        if self._runs is None:
            return
        folder = self._runs / run_id
        sizes = {str(path.relative_to(folder)): size_of(path) for path in _parts(folder)}
        tenant = tenant_of(folder)
        with self._lock:
            owner = tenant if tenant is not None else self._owners.get(run_id, "")
            before = sum(self._sizes.pop(run_id, {}).values())
            self._by_tenant[self._owners.get(run_id, owner)] -= before
            if folder.exists():
                self._owners[run_id] = owner
                self._sizes[run_id] = sizes
                self._by_tenant[owner] += sum(sizes.values())
            else:
                self._owners.pop(run_id, None)

    def set_owner(self, run_id: str, tenant: str) -> None:
        """Record the owner of a run."""
        with self._lock:
            self._owners[run_id] = tenant

    def measure(self, path: Path) -> None:
        """Measure a part of a run's folder that was written or removed: a directory with its files, or a file."""
        if self._runs is None:
            return
        parts = path.relative_to(self._runs).parts
        run_id, name = parts[0], "/".join(parts[1:])
        with self._lock:
            size = size_of(path)
            if run_id not in self._owners:
                return  # the whole run is counted once its owner is known
            sizes = self._sizes.setdefault(run_id, {})
            self._by_tenant[self._owners[run_id]] += size - sizes.pop(name, 0)
            if size:
                sizes[name] = size


NO_GUARD = DiskGuard()
"""Refuses only what does not fit, and counts nothing."""


def _parts(folder: Path) -> Iterator[Path]:
    """Yield the counted parts of a run's folder: metrics, rollouts, and what its subfolders hold.

    A subfolder that cannot be listed has none.
    """
    yield from (folder / layout.METRICS_FILE, folder / layout.ROLLOUTS_FILE)
    for part in folder.iterdir() if folder.exists() else ():
        try:
            yield from layout.entries(part, "[!.]*")
        except OSError as error:
            _log.error("bytes cannot be counted; counting none", folder=str(part), error=str(error))


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of a directory's files, as far as they can be read; 0 if it does not exist."""
    size = 0
    with suppress(OSError):  # the data is already written, so counting must not fail
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    size += entry.stat().st_size
        except NotADirectoryError:
            size = path.stat().st_size
    return size

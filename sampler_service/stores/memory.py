"""Reports the memory for versions: slots, host memory and disk, with their limits and usage."""

from __future__ import annotations

from paceline.log import get_logger
from sampler_service.engine.protocol import Slots
from sampler_service.metrics import SamplerMetrics
from sampler_service.settings import SamplerSettings
from sampler_service.stores.base import Versions
from sampler_service.stores.disk import DiskTier

_MIB = 1 << 20
_log = get_logger(__name__)


def show_memory(
    settings: SamplerSettings, slots: Slots, versions: Versions, disk: DiskTier, metrics: SamplerMetrics
) -> None:
    """Log the limits on slots, host memory and disk that the settings imply, and export their usage as metrics."""
    _log.info(
        "memory for versions",
        slots=slots.count,
        slots_mib=round(slots.size_bytes / _MIB),
        loaded_at_most=settings.max_loaded_versions,
        on_disk_at_most=disk.most,
    )
    metrics.slots.set(slots.count)
    metrics.slot_bytes.set(slots.size_bytes)
    metrics.versions_in_use.set_function(lambda: sum(entry.requests_in_flight > 0 for entry in versions))
    metrics.versions_loaded.set_function(lambda: len(versions))
    metrics.version_bytes.set_function(lambda: sum(entry.size_bytes for entry in versions))
    metrics.versions_on_disk.set_function(lambda: len(disk))
    metrics.disk_bytes.set_function(lambda: disk.size_bytes)

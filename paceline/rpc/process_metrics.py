"""Metrics of what every service has: its process, its Python, its version, the disks that it writes to."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, GCCollector, PlatformCollector, ProcessCollector

from paceline import __version__


def add_process_metrics(service: str, registry: CollectorRegistry) -> None:
    """Export process_*, python_* and paceline_<service>_build_info. They are read at a scrape and cost nothing else."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    info = Gauge(f"paceline_{service}_build_info", "1, with the version as a label", ["version"], registry=registry)
    info.labels(__version__).set(1)


def add_free_bytes(name: str, description: str, directory: Path, registry: CollectorRegistry) -> None:
    """Export the free bytes of a directory's file system; NaN while it cannot be asked."""
    Gauge(name, description, registry=registry).set_function(lambda: free_bytes(directory))


def free_bytes(directory: Path) -> float:
    """Return the free bytes of the file system that has, or would have, the directory; NaN if it cannot be asked."""
    while True:
        try:
            return float(shutil.disk_usage(directory).free)
        except FileNotFoundError:  # made when it is needed first
            if directory == directory.parent:
                return math.nan
            directory = directory.absolute().parent
        except OSError:
            return math.nan

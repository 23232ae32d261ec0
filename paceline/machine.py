"""Detect the machine's GPUs from files, so that a process that does not compute on them never touches CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """Count the GPUs that this process may use."""
    return len(visible_gpus(os.environ))


def visible_gpus(environment: Mapping[str, str], driver: Path = _NVIDIA) -> tuple[str, ...]:
    """Return the NVIDIA GPUs that a process with this environment may use, named as in CUDA_VISIBLE_DEVICES.

    A name is an index or a UUID. As in CUDA, an entry that names no GPU hides those after it, so an empty variable or
    -1 hides all.
    """
    present = tuple(map(str, range(len(list(driver.iterdir()))))) if driver.is_dir() else ()
    if not present or "CUDA_VISIBLE_DEVICES" not in environment:
        return present
    chosen = (name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(","))
    return tuple(takewhile(lambda name: name in present or name.startswith(("GPU-", "MIG-")), chosen))

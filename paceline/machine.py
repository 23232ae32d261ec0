"""What this machine has, read from files, so that no process touches CUDA that does not compute on it."""

from __future__ import annotations

from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """Count the NVIDIA GPUs that the driver shows."""
    return len(list(_NVIDIA.iterdir())) if _NVIDIA.is_dir() else 0

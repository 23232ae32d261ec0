"""What of the machine trainer and sampler get: GPUs or cores of their own, so that neither slows the other down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.up.errors import CannotStart


@dataclass(frozen=True, slots=True)
class Share:
    """What one service gets."""

    name: str = ""
    """In words, such as "core 0"; empty means nothing in particular."""
    cores: frozenset[int] = frozenset()
    """Cores that it may use; empty means all."""
    environment: Mapping[str, str] = field(default_factory=dict)


def share_gpus(gpus: Sequence[str], trainer: int, sampler: int, *, together: bool) -> tuple[Share, Share]:
    """Give the trainer the first so many GPUs and the sampler the next ones.

    A single GPU they share, half of its memory for the sampler; with `together` they share the first, since weights
    that both use lie there. Raises CannotStart when there are fewer than they need.
    """
    if together or (len(gpus) == 1 and trainer == sampler == 1):
        first = {"CUDA_VISIBLE_DEVICES": gpus[0]}
        half = {**first, "PACELINE_SAMPLER_GPU_MEMORY_UTILIZATION": "0.5"}
        return Share(f"GPU {gpus[0]}", environment=first), Share(f"half of GPU {gpus[0]}", environment=half)
    if trainer + sampler > len(gpus):
        raise CannotStart(
            f"PACELINE_TRAINER_RANKS asks for {trainer} GPUs, the sampler's parallel sizes for {sampler}, "
            f"and there are {len(gpus)}: {', '.join(gpus)}"
        )
    return _gpu_share(gpus[:trainer]), _gpu_share(gpus[trainer : trainer + sampler])


def _gpu_share(gpus: Sequence[str]) -> Share:
    names = ", ".join(gpus)
    return Share(f"GPU {names}", environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus)})


def share_cores(cores: Sequence[int]) -> tuple[Share, Share]:
    """Give each half of the cores: two OpenMP pools on the same ones wait for each other. A single core they share."""
    half = max(1, len(cores) // 2)
    return _core_share(cores[:half]), _core_share(cores[half:] or cores)


def _core_share(cores: Sequence[int]) -> Share:
    threads = str(len(cores))
    names = f"core {cores[0]}" if len(cores) == 1 else f"{len(cores)} cores from {cores[0]} to {cores[-1]}"
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # The cores are set on the process; told of cores, vLLM would start a worker process and bind that instead.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return Share(names, frozenset(cores), variables)

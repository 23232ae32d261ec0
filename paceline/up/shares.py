"""Divide the machine between trainer and sampler: separate GPUs or cores, so that neither slows the other down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.up.errors import CannotStart


@dataclass(frozen=True, slots=True)
class Share:
    """One service's share of the machine."""

    name: str = ""
    """In words, such as "core 0"; empty means no particular share."""
    cores: frozenset[int] = frozenset()
    """Cores that it may use; empty means all."""
    environment: Mapping[str, str] = field(default_factory=dict)


def share_gpus(gpus: Sequence[str], trainer: int, sampler: int, *, together: bool) -> tuple[Share, Share]:
    """Give the first `trainer` GPUs to the trainer and the next `sampler` GPUs to the sampler.

    They share a single GPU, with half of its memory for the sampler. With `together` they share the first GPU, because
    it holds the weights that both use. Raises CannotStart if there are too few GPUs.
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
    """Give each half of the cores, because two OpenMP pools on the same cores stall each other; share a single core."""
    half = max(1, len(cores) // 2)
    return _core_share(cores[:half]), _core_share(cores[half:] or cores)


def _core_share(cores: Sequence[int]) -> Share:
    threads = str(len(cores))
    names = f"core {cores[0]}" if len(cores) == 1 else f"{len(cores)} cores from {cores[0]} to {cores[-1]}"
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # The process's affinity is set directly; given cores, vLLM would start a worker process and bind that instead.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return Share(names, frozenset(cores), variables)

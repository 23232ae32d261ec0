"""Resolves settings with the value `auto` from the hardware of this machine."""

from __future__ import annotations

from pathlib import Path

from paceline.machine import count_gpus
from trainer_service.engine.options import Dtype, EngineOptions
from trainer_service.settings import TrainerSettings


def choose_options(settings: TrainerSettings) -> EngineOptions:
    """Build the engine's options. The service process never touches CUDA, so this only reads files."""
    device = settings.device if settings.device != "auto" else _find_device()
    dtype: Dtype = settings.dtype if settings.dtype != "auto" else _find_dtype(device)
    return EngineOptions(
        model_path=settings.model,
        model_name=settings.served_name,
        dtype=dtype,
        device=device,
        base_dir="" if settings.base_dir is None else str(settings.base_dir),
        ranks=settings.ranks,
        pack_tokens=settings.pack_tokens,
        joint_passes=settings.joint_passes,
        logprob_chunk=settings.logprob_chunk,
        activation_checkpointing=settings.activation_checkpointing,
        compile=settings.compile,
        max_lora_rank=settings.max_lora_rank,
        run_memory_bytes=None if settings.run_memory_gib is None else int(settings.run_memory_gib * (1 << 30)),
        scratch_dir=str(settings.scratch_dir / f"engine-{settings.volume_id}"),
        failpoints=settings.failpoints,
    )


def _find_device() -> str:
    return "cuda" if count_gpus() else "cpu"


def _find_dtype(device: str) -> Dtype:
    if device != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    # Without AMX, bfloat16 products on a CPU are no faster than float32 ones, and less exact.
    return "bfloat16" if cpuinfo.exists() and " amx_bf16" in cpuinfo.read_text() else "float32"

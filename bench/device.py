"""The device on which a bench's arms run, and what vLLM needs to know of it."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.machine import count_gpus

_BESIDE_WEIGHTS = 9e9
"""Bytes on a GPU for a sampler's adapters, activations, CUDA graphs and KV cache."""
MAX_BATCHED_TOKENS = 2048
"""Tokens that one step of vLLM's server may compute on a GPU: what vLLM defaults to in the sampler service."""


@dataclass(frozen=True)
class Device:
    """The device of every arm."""

    kind: str
    """cpu or cuda."""
    cores: Sequence[int]
    """Cores that the arms are kept on; empty on a GPU, where all arms use all cores."""
    eager: bool = False
    """Whether vLLM runs without CUDA graphs and compilation on a GPU. On a CPU it always does with adapters."""

    @classmethod
    def chosen(cls, options: argparse.Namespace, cores: Sequence[int]) -> Device:
        """Return what the options of `add_device_options` mean."""
        return cls(options.device, () if options.device == "cuda" else cores, options.eager)

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def pin(self, core: int) -> None:
        """Keep this process on a core, on a CPU."""
        if not self.is_gpu:
            os.sched_setaffinity(0, {core})

    def engine_settings(self, model: Path) -> dict[str, object]:
        """Return vLLM's settings by which several engines with one model's weights share a GPU; none on a CPU."""
        if not self.is_gpu:
            return {}
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        share = math.ceil(100 * (weights + _BESIDE_WEIGHTS) / gpu_bytes()) / 100
        return {"gpu_memory_utilization": share, "enforce_eager": self.eager}


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add --device, whose value becomes cpu or cuda."""

    def resolve(asked: str) -> str:
        return asked if asked != "auto" else "cuda" if count_gpus() else "cpu"

    parser.add_argument(
        "--device", type=resolve, choices=("cpu", "cuda"), default="auto", metavar="{auto,cpu,cuda}",
        help="auto: cuda where there is one",
    )  # fmt: skip


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add --device and --eager."""
    add_device_option(parser)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs and no compilation in any arm, on a GPU")


def gpu_bytes() -> int:
    """Return the memory of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]) * 2**20


def vllm_variables(threads: int) -> dict[str, str]:
    """Return the environment of a process that runs vLLM with some threads on a CPU, or, with 0, on a GPU.

    Every arm uses vLLM's first model runner, as the sampler service does.
    """
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if not threads:
        return common
    # With adapters vLLM runs eagerly on a CPU but still compiles parts, which the sampler service does not compile.
    return {
        **common,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
    }


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """Return vLLM's flags for settings by their Python names."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags.append(f"--{flag}={value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{flag}")
    return flags


def as_variables(prefix: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Return a service's variables for settings by their Python names."""
    return {f"{prefix}_{name.upper()}": str(value) for name, value in settings.items()}

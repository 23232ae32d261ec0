"""The command's options, with the names that Atropos' example trainer uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LORA_BRIDGES = {"lora_only": "", "lora_restart": "", "lora_nccl": "collective"}
FULL_BRIDGES = {"none": "", "shared_vllm": "shared"}
"""Maps --weight-bridge-mode to the required bridge of the sampler; empty means any."""
OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_cpu", "adafactor")

ELSEWHERE: Mapping[str, str] = {
    "--device": "PACELINE_TRAINER_DEVICE",
    "--dtype": "paceline up --dtype, or PACELINE_TRAINER_DTYPE and PACELINE_SAMPLER_DTYPE",
    "--vllm-port": "PACELINE_GATEWAY_HTTP_LISTEN",
    "--vllm-gpu": "CUDA_VISIBLE_DEVICES of the sampler",
    "--gpu-memory-utilization": "PACELINE_SAMPLER_GPU_MEMORY_UTILIZATION",
    "--max-model-len": "PACELINE_SAMPLER_MAX_MODEL_LEN",
    "--vllm-config-path": "PACELINE_SAMPLER_BASE_DIR and PACELINE_TRAINER_BASE_DIR",
    "--world-size": "PACELINE_TRAINER_RANKS",
}
"""Options of the example trainer that are service settings in Paceline."""


def layer_indices(text: str) -> tuple[int, ...]:
    """Parse "0-3,28-31". Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(f"{part!r} is not a layer or range of layers, such as 3 or 20-31")
        found |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


def _count(default: int, text: str) -> Any:
    return _option(default, text, minimum=1)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command; their metadata is its help."""

    model: str = _option("", "base model; empty: the served one", names=("--model", "--model-name"))
    run_name: str = _option("atropos", "environments sample from <gateway>/weights/<run name>/v1")
    atropos_url: str = _option("http://localhost:8000", "address of the Atropos API server (run-api)")
    state: Path | None = field(
        default=None,
        metadata={"help": "directory from which a restart resumes; by default .paceline/atropos/<run name>"},
    )
    lr: float = _option(1e-5, "learning rate")
    training_steps: int = _count(10, "optimizer steps")
    batch_size: int = _count(2, "sequences in one forward_backward")
    gradient_accumulation_steps: int = _count(32, "forward_backward calls in a step")
    seq_len: int = _count(2048, "maximum number of tokens in a sequence; the rest is cut off")
    warmup_steps: int = _option(0, "steps over which the learning rate grows from 0")
    clip_eps: float = _option(0.2, "the ratio is clipped to 1 - eps and 1 + eps")
    optimizer: str = _option("adamw", "optimizer", choices=OPTIMIZERS)
    adafactor_scale_parameter: bool = _option(False, "adafactor: scale by each weight's root mean square")
    adafactor_relative_step: bool = _option(False, "adafactor: at most 1 / sqrt(step) as learning rate")
    weight_bridge_mode: str = _option(
        "lora_only",
        "lora_*: train an adapter, which reaches samplers through their bridge (lora_nccl: collective); "
        "none, shared_vllm: train every parameter (shared_vllm: the sampler's bridge must be shared)",
        choices=(*LORA_BRIDGES, *FULL_BRIDGES),
    )
    vllm_restart_interval: int = _count(1, "steps between published versions")
    checkpoint_interval: int = _option(3, "steps between state checkpoints; 0: only the last one")
    save_path: Path | None = field(
        default=None, metadata={"help": "directory to which the trained weights are downloaded at the end"}
    )
    lora_r: int = _count(16, "rank")
    lora_alpha: float = _option(32.0, "scaling numerator")
    lora_dropout: float = _option(0.05, "dropout on the adapter's input")
    lora_target_modules: tuple[str, ...] = _option(("q_proj", "v_proj"), "modules with an adapter, by name")
    lora_layer_indices: tuple[int, ...] = _option((), "layers with an adapter, as 0-3,28-31", parse=layer_indices)
    use_wandb: bool = _option(False, "log to Weights & Biases, which must be installed")
    wandb_project: str = _option("", "project there")
    wandb_group: str = _option("", "group there")
    benchmark: bool = _option(False, "print at the end how the time was spent")
    log_dir: Path | None = field(default=None, metadata={"help": "directory for metrics.jsonl"})

    @property
    def directory(self) -> Path:
        """Directory from which a restart resumes."""
        return self.state or Path(".paceline/atropos") / self.run_name

    @property
    def is_lora(self) -> bool:
        """Whether the run trains an adapter rather than every parameter."""
        return self.weight_bridge_mode in LORA_BRIDGES

    @property
    def bridge(self) -> str:
        """Required bridge of the sampler; empty for any."""
        return {**LORA_BRIDGES, **FULL_BRIDGES}[self.weight_bridge_mode]

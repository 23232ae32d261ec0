"""The command's options, with the names that Atropos' example trainer uses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LORA_BRIDGES = {"lora_only": "", "lora_restart": "", "lora_nccl": "collective"}
FULL_BRIDGES = {"none": "", "shared_vllm": "shared"}
"""Maps --weight-bridge-mode to the required bridge of the sampler; empty means any."""
OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_cpu", "adafactor")

_ELSEWHERE = {
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


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command."""

    model: str
    run_name: str
    atropos_url: str
    state: Path
    lr: float
    training_steps: int
    batch_size: int
    gradient_accumulation_steps: int
    seq_len: int
    warmup_steps: int
    clip_eps: float
    optimizer: str
    adafactor_scale_parameter: bool
    adafactor_relative_step: bool
    weight_bridge_mode: str
    vllm_restart_interval: int
    checkpoint_interval: int
    save_path: Path | None
    lora_r: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: tuple[str, ...]
    lora_layer_indices: tuple[int, ...]
    use_wandb: bool
    wandb_project: str
    wandb_group: str
    benchmark: bool
    log_dir: Path | None

    @property
    def is_lora(self) -> bool:
        """Whether the run trains an adapter rather than every parameter."""
        return self.weight_bridge_mode in LORA_BRIDGES

    @property
    def bridge(self) -> str:
        """Required bridge of the sampler; empty for any."""
        return {**LORA_BRIDGES, **FULL_BRIDGES}[self.weight_bridge_mode]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    add = parser.add_argument
    add("--model", "--model-name", dest="model", default="", help="base model; empty: the served one")
    add("--run-name", default="atropos", help="environments sample from <gateway>/weights/<run name>/v1")
    add("--atropos-url", default="http://localhost:8000", help="address of the Atropos API server (run-api)")
    add(
        "--state",
        type=Path,
        default=None,
        help="directory from which a restart resumes; by default .paceline/atropos/<run name>",
    )
    add("--lr", type=float, default=1e-5, help="learning rate")
    add("--training-steps", type=_count, default=10, help="optimizer steps")
    add("--batch-size", type=_count, default=2, help="sequences in one forward_backward")
    add("--gradient-accumulation-steps", type=_count, default=32, help="forward_backward calls in a step")
    add("--seq-len", type=_count, default=2048, help="maximum number of tokens in a sequence; the rest is cut off")
    add("--warmup-steps", type=int, default=0, help="steps over which the learning rate grows from 0")
    add("--clip-eps", type=float, default=0.2, help="the ratio is clipped to 1 - eps and 1 + eps")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer")
    add("--adafactor-scale-parameter", action="store_true", help="adafactor: scale by each weight's root mean square")
    add("--adafactor-relative-step", action="store_true", help="adafactor: at most 1 / sqrt(step) as learning rate")
    add(
        "--weight-bridge-mode",
        choices=(*LORA_BRIDGES, *FULL_BRIDGES),
        default="lora_only",
        help="lora_*: train an adapter, which reaches samplers through their bridge (lora_nccl: collective); "
        "none, shared_vllm: train every parameter (shared_vllm: the sampler's bridge must be shared)",
    )
    add("--vllm-restart-interval", type=_count, default=1, help="steps between published versions")
    add("--checkpoint-interval", type=int, default=3, help="steps between state checkpoints; 0: only the last one")
    add("--save-path", type=Path, default=None, help="directory to which the trained weights are downloaded at the end")
    add("--lora-r", type=_count, default=16, help="rank")
    add("--lora-alpha", type=float, default=32, help="scaling numerator")
    add("--lora-dropout", type=float, default=0.05, help="dropout on the adapter's input")
    add("--lora-target-modules", nargs="+", default=("q_proj", "v_proj"), help="modules with an adapter, by name")
    add("--lora-layer-indices", type=layer_indices, default=(), help="layers with an adapter, as 0-3,28-31")
    add("--use-wandb", action="store_true", help="log to Weights & Biases, which must be installed")
    add("--wandb-project", default="", help="project there")
    add("--wandb-group", default="", help="group there")
    add("--benchmark", action="store_true", help="print at the end how the time was spent")
    add("--log-dir", type=Path, default=None, help="directory for metrics.jsonl")
    for name, setting in _ELSEWHERE.items():
        add(name, type=_elsewhere(name, setting), help=argparse.SUPPRESS)


def read_options(given: argparse.Namespace) -> Options:
    """Return the options of parsed arguments."""
    values = {name: getattr(given, name) for name in Options.__dataclass_fields__}
    values["state"] = given.state or Path(".paceline/atropos") / given.run_name
    values["lora_target_modules"] = tuple(values["lora_target_modules"])
    return Options(**values)


def layer_indices(text: str) -> tuple[int, ...]:
    """Parse "0-3,28-31". Raises ArgumentTypeError."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise argparse.ArgumentTypeError(f"{part!r} is not a layer or range of layers, such as 3 or 20-31")
        found |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _elsewhere(name: str, setting: str) -> Callable[[str], Sequence[str]]:
    def refuse(_: str) -> Sequence[str]:
        raise argparse.ArgumentTypeError(f"{name} is a setting of Paceline's services: {setting}")

    return refuse

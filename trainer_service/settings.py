"""Settings of the trainer service: `PACELINE_TRAINER_*` and flags."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from paceline.machine import count_gpus
from paceline.settings import Address, BackendSettings
from trainer_service.engine_link.options import Dtype, EngineOptions


class TrainerSettings(BackendSettings):
    """Settings of the trainer."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_TRAINER_", cli_prog_name="python -m paceline.services trainer_service"
    )

    listen: Address = "127.0.0.1:50051"
    """Address of the service, host:port."""
    health_listen: Address = "127.0.0.1:50151"
    """Address of grpc.health.v1: always plaintext and without a credential, for health probes."""
    model: str
    """Base model: a local directory or a Hugging Face id."""
    model_name: str = ""
    """Name that clients use; empty means the last part of `model`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the base model's arithmetic; adapters are always trained in float32.

    auto: bfloat16 if the hardware supports it.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if a GPU is present."""
    base_dir: Path | None = None
    """Directory in which a sampler on this machine (bridge shared) lends its base weights: the sampler's `base_dir`.

    Unset: the trainer loads its own.
    """
    ranks: int = Field(1, ge=1)
    """Number of engine processes, each with a GPU or a share of the cores; the base model is sharded over them."""
    checkpoint_dir: Path = Path(".paceline/checkpoints")
    """The checkpoint volume."""
    staging_dir: Path = Path("/dev/shm")  # noqa: S108
    """Staging directory for streamed versions; preferably in memory."""
    run_memory_gib: float | None = Field(None, gt=0)
    """GiB for weights, gradients and optimizer states of all runs; runs that do not fit are offloaded to `scratch_dir`.

    Unset means no limit.
    """
    scratch_dir: Path = Path(".paceline/scratch")
    """Directory for offloaded runs, on a fast local disk. Its contents need not survive a restart."""
    max_lora_rank: int = Field(64, ge=1)
    """Largest rank that CreateRun accepts; keep it at or below every sampler's."""
    max_runs_per_tenant: int = Field(64, ge=1)
    """Most runs that a tenant may have at a time."""
    max_downloads_per_tenant: int = Field(16, ge=1)
    """Most checkpoints and versions that a tenant may be downloading at a time; its further downloads wait."""
    max_datums: int = Field(1024, ge=1)
    """Most datums in one ForwardBackward."""
    pack_tokens: int = Field(4096, ge=1)
    """Tokens in one forward pass of a rank; determines the peak activation memory."""
    joint_passes: bool = False
    """Whether a pass may contain tokens of several runs.

    Off: a run's results do not depend on other runs, and a replay repeats its steps, bit for bit. On: small batches of
    many runs are faster, but rounding depends on which runs share a pass.
    """
    logprob_chunk: int = Field(256, ge=1)
    """Positions whose logits are in memory at a time; determines the peak memory of the loss."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: saves memory, costs one more forward pass."""
    compile: bool = False
    """Compile the element-wise parts of the layers; on a CPU this requires a C++ compiler."""
    group_listen: Address = "127.0.0.1:0"
    """Address at which samplers (bridge collective) reach the trainer's process group; port 0 means any free port.

    The group's traffic is neither encrypted nor authenticated: use a network that nobody else is on.
    """
    group_backend: Literal["gloo", "nccl"] = "gloo"
    """Backend of torch.distributed: gloo, or nccl if trainer and samplers have GPUs."""
    group_seconds: float = Field(30.0, gt=0)
    """How long one broadcast may take before the group counts as lost."""
    gap_wait_seconds: float = Field(60.0, gt=0)
    """How long a command waits for missing earlier commands."""
    max_volume_bytes_per_tenant: int | None = Field(None, ge=0)
    """Most bytes on the checkpoint volume per tenant: checkpoints, versions, snapshots and journals.

    Unset means half of the volume's capacity; 0 means no limit.
    """
    max_waiting_bytes: int = Field(2 << 30, ge=0)
    """Most bytes of waiting commands of all tenants; further ones are refused with OVERLOADED. 0: no limit.

    Memory use is two to three times as high.
    """
    max_waiting_bytes_per_tenant: int = Field(512 << 20, ge=0)
    """Most bytes of one tenant's waiting commands; further ones are refused with QUOTA_EXCEEDED. 0: no limit."""
    max_replay_bytes: int = Field(512 << 20, ge=0)
    """Most bytes of journals in memory at a time while runs are rebuilt; further runs wait. 0: no limit.

    A larger journal is read alone.
    """
    metrics_max_bytes_per_run: int = Field(64 << 20, ge=4096)
    """Most bytes of a run's metrics; beyond them, every second step is dropped from the older half."""
    rollouts_max_bytes_per_run: int = Field(32 << 20, ge=4096)
    """Most bytes of the rollouts that clients log for a run; beyond them, the oldest are dropped."""
    keep_versions: int = Field(8, ge=1)
    """Newest versions of a run that are kept, in addition to those that samplers hold."""
    snapshot_commands: int = Field(256, ge=1)
    """Commands after which a snapshot of a run is saved, to keep its journal short."""
    snapshot_bytes: int = Field(256 << 20, ge=1)
    """Bytes of journal after which a snapshot of a run is saved."""
    snapshot_seconds: float = Field(120.0, gt=0)
    """Seconds of execution after which a snapshot of a run is saved; bounds the time of a replay."""
    max_attempts: int = Field(5, ge=1)
    """How often the engine may die while it executes an unanswered command before the command is refused."""
    engine_silence_seconds: float = Field(60.0, gt=0)
    """How long the engine process may give no sign of life before it is killed and replaced."""
    engine_stall_seconds: float = Field(900.0, gt=0)
    """How long one pass or command of the engine may take before it counts as hung and the engine is replaced."""
    min_free_bytes: int = Field(256 << 20, ge=0)
    """Bytes on the checkpoint volume that commands, checkpoints and versions leave free for answers and small files."""
    failpoints: str = ""
    """Points at which the service kills itself, for tests; see trainer_service/failpoints.py."""
    expiry_check_seconds: float = Field(60.0, gt=0)
    """Interval between searches for checkpoints past their time to live."""

    @model_validator(mode="after")
    def _check_base_dir(self) -> Self:
        if self.base_dir is not None and self.ranks > 1:
            raise ValueError("base_dir requires ranks=1: each rank would need its own part of the weights")
        return self

    @property
    def volume_id(self) -> str:
        """Id derived from the checkpoint volume's path, to name files of the one trainer that uses it."""
        return sha256(str(self.checkpoint_dir.resolve()).encode()).hexdigest()[:16]

    @property
    def served_name(self) -> str:
        """The base model's name for clients."""
        return self.model_name or self.model.rstrip("/").rpartition("/")[2]

    def engine_options(self) -> EngineOptions:
        """Return the engine's options; settings with the value `auto` are resolved from this machine's hardware."""
        # The service process never touches CUDA, so this only reads files.
        device = self.device if self.device != "auto" else "cuda" if count_gpus() else "cpu"
        return EngineOptions(
            model_path=self.model,
            model_name=self.served_name,
            dtype=self.dtype if self.dtype != "auto" else _find_dtype(device),
            device=device,
            base_dir="" if self.base_dir is None else str(self.base_dir),
            ranks=self.ranks,
            pack_tokens=self.pack_tokens,
            joint_passes=self.joint_passes,
            logprob_chunk=self.logprob_chunk,
            activation_checkpointing=self.activation_checkpointing,
            compile=self.compile,
            max_lora_rank=self.max_lora_rank,
            run_memory_bytes=None if self.run_memory_gib is None else int(self.run_memory_gib * (1 << 30)),
            scratch_dir=str(self.scratch_dir / f"engine-{self.volume_id}"),
            failpoints=self.failpoints,
        )


def _find_dtype(device: str) -> Dtype:
    if device != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    # Without AMX, bfloat16 products on a CPU are no faster than float32 ones, and less exact.
    return "bfloat16" if cpuinfo.exists() and " amx_bf16" in cpuinfo.read_text() else "float32"

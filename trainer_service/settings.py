"""Settings of the trainer service: `PACELINE_TRAINER_*` and flags."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from paceline.settings import Address, BackendSettings


class TrainerSettings(BackendSettings):
    """What the trainer can be told."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_TRAINER_", cli_prog_name="python -m trainer_service")

    listen: Address = "127.0.0.1:50051"
    """Address of the service, host:port."""
    health_listen: Address = "127.0.0.1:50151"
    """Address of grpc.health.v1, always plaintext and without a credential, as probes need it."""
    model: str
    """Base model: a local directory or a Hugging Face id."""
    model_name: str = ""
    """Name that clients use; empty means the last part of `model`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the base model's arithmetic; adapters are trained in float32 always.

    auto: bfloat16 where the hardware has it.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    base_dir: Path | None = None
    """Directory where a sampler on this machine, whose bridge is shared, lends its base weights: its `base_dir`.

    Unset: the trainer loads its own.
    """
    ranks: int = Field(1, ge=1)
    """Processes that the engine consists of, with a GPU each, or a share of the cores; the base model is sharded."""
    checkpoint_dir: Path = Path(".paceline/checkpoints")
    """The checkpoint volume."""
    staging_dir: Path = Path("/dev/shm")  # noqa: S108
    """Where versions are staged for streaming; memory, best."""
    run_memory_gib: float | None = Field(None, gt=0)
    """GiB that the weights, gradients and optimizer states of all runs may take; the others wait in `scratch_dir`.

    Unset means no limit.
    """
    scratch_dir: Path = Path(".paceline/scratch")
    """Where runs wait that do not fit; a fast local disk. Nothing there needs to last."""
    max_lora_rank: int = Field(64, ge=1)
    """Largest rank that CreateRun takes; keep it at or below every sampler's."""
    max_runs_per_tenant: int = Field(64, ge=1)
    """Runs that a tenant may have at a time."""
    max_datums: int = Field(1024, ge=1)
    """Most datums in one ForwardBackward."""
    pack_tokens: int = Field(4096, ge=1)
    """Tokens in one forward pass of a rank; sets the peak of activation memory."""
    joint_passes: bool = False
    """Whether one pass takes tokens of several runs.

    Off, other runs change no bit of a run's results, and a replay repeats its steps bit for bit. On, small batches of
    many runs are faster, and who shares a pass changes the rounding.
    """
    logprob_chunk: int = Field(256, ge=1)
    """Positions whose logits exist at one time; sets the peak of the loss's memory."""
    activation_checkpointing: bool = False
    """Compute each decoder layer again in the backward pass: less memory, a forward pass more."""
    compile: bool = False
    """Compile the element-wise parts of the layers; on a CPU this takes a C++ compiler."""
    group_listen: Address = "127.0.0.1:0"
    """Where samplers whose bridge is collective meet the trainer: an address that they reach; port 0: any free one.

    What goes over the group is neither encrypted nor authenticated: use a network that nobody else is on.
    """
    group_backend: Literal["gloo", "nccl"] = "gloo"
    """torch.distributed's backend: gloo, or nccl where trainer and samplers have GPUs."""
    group_seconds: float = Field(30.0, gt=0)
    """How long one broadcast may take before the group counts as lost."""
    gap_wait_seconds: float = Field(60.0, gt=0)
    """How long a command waits for those before it."""
    max_volume_bytes_per_tenant: int | None = Field(None, ge=0)
    """Bytes on the checkpoint volume that a tenant's runs may have: checkpoints, versions, snapshots and journals.

    Unset means half of what the volume can hold; 0 no limit.
    """
    max_waiting_bytes: int = Field(2 << 30, ge=0)
    """Bytes of commands that wait for their turn, of all tenants; more are refused with OVERLOADED. 0: no limit.

    Memory is two to three times as much.
    """
    max_waiting_bytes_per_tenant: int = Field(512 << 20, ge=0)
    """Bytes of one tenant's commands that wait for their turn; more are refused with QUOTA_EXCEEDED. 0: no limit."""
    max_replay_bytes: int = Field(512 << 20, ge=0)
    """Bytes of journals that are in memory at a time while runs are rebuilt; others wait. 0: no limit.

    A larger journal is read alone.
    """
    keep_versions: int = Field(8, ge=1)
    """Newest versions of a run that are kept beside those that samplers hold."""
    snapshot_commands: int = Field(256, ge=1)
    """Commands after which a run's state is saved, so that its journal is short."""
    snapshot_bytes: int = Field(256 << 20, ge=1)
    """Bytes of journal after which it is saved."""
    snapshot_seconds: float = Field(120.0, gt=0)
    """Seconds of execution after which it is saved: what a replay may take."""
    max_attempts: int = Field(5, ge=1)
    """How often the engine may die of a command that has no answer before the command is refused."""
    engine_silence_seconds: float = Field(60.0, gt=0)
    """How long the engine's process may give no sign of life before it is killed and another started."""
    engine_stall_seconds: float = Field(900.0, gt=0)
    """How long one pass or command of the engine may take before it counts as hanging, and the engine is replaced."""
    min_free_bytes: int = Field(256 << 20, ge=0)
    """Bytes of the checkpoint volume that commands, checkpoints and versions leave free for answers and small files."""
    failpoints: str = ""
    """Points at which the service kills itself, for tests; see trainer_service/failpoints.py."""
    expiry_check_seconds: float = Field(60.0, gt=0)
    """How often checkpoints past their time to live are looked for."""

    @model_validator(mode="after")
    def _check_base_dir(self) -> Self:
        if self.base_dir is not None and self.ranks > 1:
            raise ValueError("base_dir takes ranks=1: each rank would need a part of the weights of its own")
        return self

    @property
    def volume_id(self) -> str:
        """Name of the checkpoint volume, for what belongs to the one trainer that uses it."""
        return sha256(str(self.checkpoint_dir.resolve()).encode()).hexdigest()[:16]

    @property
    def served_name(self) -> str:
        """The base model's name for clients."""
        return self.model_name or self.model.rstrip("/").rpartition("/")[2]

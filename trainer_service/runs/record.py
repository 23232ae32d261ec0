"""A run's record, and the part of it that survives a restart (run.json)."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from paceline import errors
from paceline.layout import RUN_FILE
from paceline.types import CheckpointKind, FullParameters, LoraConfig, Run, RunParameters, RunState, WeightStorage
from trainer_service.journal.format import Counters
from trainer_service.journal.snapshots import SnapshotStore
from trainer_service.limits.gates import FifoGate
from trainer_service.runs.sequencer import Sequencer
from trainer_service.volume_files import decode_checked

_WEIGHT_BYTES, _STATE_BYTES = 4, 16


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """Immutable properties of a run, read from its file without opening its journal."""

    tenant: str
    base_model: str
    parameters: RunParameters
    user_metadata: dict[str, str]

    @classmethod
    def from_json(cls, text: bytes) -> RunOrigin:
        """Read the properties from run.json or deleted.json. Raises DamagedFileError, UnknownFormatError."""
        content = decode_checked(text, dict[str, Any], RUN_FILE)
        tenant, base_model = content["tenant"], content["base_model"]
        return cls(tenant, base_model, _pop_parameters(content), content["user_metadata"])


@dataclass(slots=True)
class RunRecord:
    """A run's record in the service's memory."""

    run_id: str
    tenant: str
    base_model: str
    parameters: RunParameters
    """What the run trains: an adapter or all parameters."""
    create_time: datetime
    trainable_parameters: int
    request_id: str
    request_digest: str
    """Digest of the CreateRun request, to tell its repetition from another request with the same request_id."""
    sequencer: Sequencer
    snapshots: SnapshotStore
    base_sha256: str = ""
    """Identity of the base weights that the run was created on; empty if not known yet."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    last_use_time: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When a command arrived last, a client attached, or the run was created."""
    written_use_time: datetime | None = None
    """The `last_use_time` that run.json has."""
    adapted_modules: tuple[str, ...] = ()
    step: int = 0
    gradient_tokens: int = 0
    """Counted positions of the gradient that waits; 0 if none waits."""
    latest_version: int = 0
    next_version: int = 1
    """Number of the next version to publish."""
    version_limit: int = 0
    """Version numbers up to this one may be in use; a run whose journal is lost continues above it."""
    attachment: int = 0
    """Number of the newest client that attached; 0 if none did."""
    attached: dict[str, int] = field(default_factory=dict)
    """Numbers of the newest clients, by the request_id of their AttachRun."""
    state: RunState = RunState.READY
    in_engine: bool = True
    """Whether the engine holds the run."""
    is_restored: bool = True
    """Whether recovery into the current engine is complete; false from an engine's death to the end of the replay."""
    counters_before_replay: Counters | None = None
    """The counters before a replay that is in progress, which clients see meanwhile; None if none is."""
    counters_at_start: Counters = field(default_factory=Counters)
    """The counters when the sequencer started, before any command that it has executed since."""
    recovering: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the run is being rebuilt or deleted."""
    reserving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while `version_limit` is raised."""
    persisting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while run.json is written, so that the newest content is written last, and while a client attaches."""
    is_deleted: bool = False
    """Whether the run's files are deleted."""
    damage: list[str] = field(default_factory=list)
    """Names in the run's folder of files and directories that were damaged and set aside."""
    unsaved_seconds: float = 0.0
    """Execution that no snapshot has: about what a restart would replay."""
    announcing: FifoGate = field(default_factory=FifoGate)
    """Orders concurrent publishes, so that versions are announced in order."""

    @property
    def list_key(self) -> str:
        """Sort key of lists: time of creation, then id."""
        return f"{self.create_time.timestamp():020.6f} {self.run_id}"

    @property
    def present_step(self) -> int:
        """Optimizer steps taken; in the middle of a replay, as before it."""
        return (self.counters_before_replay or self.counters()).step

    def counters(self) -> Counters:
        """Return the counters that the journal keeps with each answer."""
        return Counters(self.step, self.latest_version, self.next_version, self.gradient_tokens)

    def apply(self, counters: Counters) -> None:
        """Set the run's counters to those of a journal."""
        self.set_place(counters)
        self.latest_version, self.counters_at_start = counters.latest_version, counters

    def state_bytes(self, kind: CheckpointKind) -> int:
        """Return a checkpoint's maximum bytes: float32 weights; for a state also gradient and two moments of each."""
        return self.trainable_parameters * (_STATE_BYTES if kind is CheckpointKind.STATE else _WEIGHT_BYTES)

    def set_place(self, counters: Counters) -> None:
        """Set the counters that depend on the place in the run's order; the others stay."""
        self.step, self.next_version, self.gradient_tokens = (
            counters.step,
            counters.next_version,
            counters.gradient_tokens,
        )

    def use(self) -> None:
        """Record that somebody works with the run now."""
        self.last_use_time = datetime.now(UTC)

    def public(self, latest_state_checkpoint: str, volume_bytes: int, ended_by: int = 0) -> Run:
        """Return the run as clients see it: after its newest executed command, never in the middle of a replay.

        `latest_state_checkpoint` is the path of its newest state checkpoint; empty if there is none. `volume_bytes` are
        those that it has on the volume. The reply of a
        command that has done all but answer is `ended_by` it, and shows the run after it.
        """
        executed = ended_by or self.sequencer.executed
        # The run's own counters are ahead of `executed` until a command is answered, and behind it in a replay.
        place = self.counters() if ended_by else self.sequencer.place(executed) or self.counters_at_start
        return Run(
            run_id=self.run_id,
            base_model=self.base_model,
            parameters=self.parameters,
            step=place.step,
            last_seq_id=self.sequencer.last_seq_id,
            latest_version=(self.counters_before_replay or self.counters()).latest_version,
            state=self.state,
            latest_state_checkpoint=latest_state_checkpoint,
            create_time=self.create_time,
            trainable_parameters=self.trainable_parameters,
            user_metadata=self.user_metadata,
            adapted_modules=self.adapted_modules,
            damage=tuple(self.damage),
            executed_seq_id=executed,
            gradient_tokens=place.gradient_tokens if self.state is RunState.READY else 0,
            volume_bytes=volume_bytes,
            last_use_time=self.last_use_time,
        )

    def to_run_file(self) -> dict[str, Any]:
        """Return the content of run.json, which survives a restart."""
        return {
            "run_id": self.run_id,
            "tenant": self.tenant,
            "base_model": self.base_model,
            "base_sha256": self.base_sha256,
            **_parameters_to_json(self.parameters),
            "create_time": self.create_time.isoformat(),
            "last_use_time": self.last_use_time.isoformat(),
            "trainable_parameters": self.trainable_parameters,
            "request_id": self.request_id,
            "request_digest": self.request_digest,
            "user_metadata": self.user_metadata,
            "adapted_modules": self.adapted_modules,
            "step": self.present_step,
            "attachment": self.attachment,
            "attached": self.attached,
            "version_limit": self.version_limit,
            "last_seq_id": self.sequencer.last_seq_id,
        }

    def lost_error(self, checkpoint: str) -> errors.RunStateLost:
        """Return the error that a run without state answers; `checkpoint` is its newest state checkpoint, if any."""
        if checkpoint:
            remedy = f"load {checkpoint} with its optimizer and continue from there"
        else:
            remedy = (
                "create a new run, unless ListCheckpoints shows a state checkpoint of this one, which can be loaded"
            )
        return errors.RunStateLost(
            f"the run's state was lost and its journal cannot be replayed; {remedy}",
            field="run_id",
            metadata={"checkpoint": checkpoint},
        )

    @classmethod
    def from_run_file(cls, content: dict[str, Any], sequencer: Sequencer, snapshots: SnapshotStore) -> RunRecord:
        """Restore a run whose state is not in the engine."""
        parameters = _pop_parameters(content)
        del content["last_seq_id"]  # the journal is authoritative
        sequencer.attach(content["attachment"])
        used = datetime.fromisoformat(content.pop("last_use_time"))
        start = Counters(step=content["step"], next_version=content["version_limit"] + 1)
        return cls(
            sequencer=sequencer,
            snapshots=snapshots,
            parameters=parameters,
            create_time=datetime.fromisoformat(content.pop("create_time")),
            last_use_time=used,
            written_use_time=used,
            adapted_modules=tuple(content.pop("adapted_modules")),
            in_engine=False,
            is_restored=False,
            counters_at_start=start,
            next_version=start.next_version,
            **content,
        )


def _parameters_to_json(parameters: RunParameters) -> dict[str, Any]:
    if isinstance(parameters, LoraConfig):
        return {"lora": asdict(parameters)}
    return {"full": {**asdict(parameters), "storage": parameters.storage.name}}


def _pop_parameters(content: dict[str, Any]) -> RunParameters:
    """Remove what a run trains from the content of run.json and return it."""
    if "lora" in content:
        lora = content.pop("lora")
        return LoraConfig(**{**lora, "layers": tuple(lora["layers"])})
    full = content.pop("full")
    return FullParameters(**{**full, "storage": WeightStorage[full["storage"]]})

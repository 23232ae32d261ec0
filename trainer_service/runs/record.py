"""What is known of a run, and the part of it that survives a restart (run.json)."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from paceline.types import CheckpointKind, FullParameters, LoraConfig, Run, RunParameters, RunState, WeightStorage
from trainer_service.journal.records import Facts
from trainer_service.journal.snapshots import SnapshotStore
from trainer_service.runs.fifo_gate import FifoGate
from trainer_service.runs.sequencer import Sequencer
from trainer_service.volume.run_file import decode_run_file

_WEIGHT_BYTES, _STATE_BYTES = 4, 16


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """What never changes of a run, read from its file without opening its journal."""

    tenant: str
    base_model: str
    parameters: RunParameters
    user_metadata: dict[str, str]

    @classmethod
    def from_json(cls, text: bytes) -> RunOrigin:
        """Read it from run.json or deleted.json. Raises DamagedFileError, UnknownFormatError."""
        facts = decode_run_file(text)
        tenant, base_model = facts["tenant"], facts["base_model"]
        return cls(tenant, base_model, _take_parameters(facts), facts.get("user_metadata", {}))


@dataclass(slots=True)
class RunRecord:
    """A run as the service holds it."""

    run_id: str
    tenant: str
    base_model: str
    parameters: RunParameters
    """What it trains."""
    create_time: datetime
    trainable_parameters: int
    request_id: str
    request_digest: str
    """Of the CreateRun request, to tell its repetition from another with the same request_id."""
    sequencer: Sequencer
    snapshots: SnapshotStore
    base_sha256: str = ""
    """Identity of the base weights that it was made on; empty where that is not known yet."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    adapted_modules: tuple[str, ...] = ()
    step: int = 0
    latest_version: int = 0
    next_version: int = 1
    """Number of the next version to publish."""
    version_limit: int = 0
    """Version numbers up to this one may be in use; a run whose journal is lost goes on above it."""
    latest_state_checkpoint: str = ""
    attachment: int = 0
    """Number of the newest client that attached; 0 means that none did."""
    attached: dict[str, int] = field(default_factory=dict)
    """Numbers of the newest clients, by the request_id of their AttachRun."""
    state: RunState = RunState.READY
    in_engine: bool = True
    """Whether the engine holds an adapter for it."""
    is_restored: bool = True
    """Whether it is as the engine that runs now should hold it; false from the engine's death to the replay's end."""
    shown: Facts | None = None
    """What held before the replay that is going on, which is what clients see meanwhile."""
    recovering: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its state is being rebuilt."""
    persisting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while run.json is written, so that what is known last is written last."""
    is_deleted: bool = False
    """Whether its files are gone."""
    damage: list[str] = field(default_factory=list)
    """Files and directories that were found damaged and set aside, by their names in the run's folder."""
    announcing: FifoGate = field(default_factory=FifoGate)
    """The publishes that have captured their weights: versions are announced in order."""

    @property
    def list_key(self) -> str:
        """Order of lists: time of creation, then id."""
        return f"{self.create_time.timestamp():020.6f} {self.run_id}"

    def facts(self) -> Facts:
        """Return what the journal keeps after each command."""
        return Facts(self.step, self.latest_version, self.next_version, self.latest_state_checkpoint)

    def apply(self, facts: Facts) -> None:
        """Take over what a journal says."""
        self.step, self.latest_version, self.next_version = facts.step, facts.latest_version, facts.next_version
        self.latest_state_checkpoint = facts.latest_state_checkpoint

    def state_bytes(self, kind: CheckpointKind) -> int:
        """Bytes that a checkpoint takes at most: float32 weights; for a state also gradient and two moments of each."""
        return self.trainable_parameters * (_STATE_BYTES if kind is CheckpointKind.STATE else _WEIGHT_BYTES)

    def go_to(self, facts: Facts) -> None:
        """Take over what held at a place in the run's order; what is known at any time stays."""
        self.step, self.next_version = facts.step, facts.next_version

    def public(self) -> Run:
        """Return what clients see: never the past, which a replay goes through."""
        facts = self.shown or self.facts()
        return Run(
            run_id=self.run_id,
            base_model=self.base_model,
            parameters=self.parameters,
            step=facts.step,
            last_seq_id=self.sequencer.last_seq_id,
            latest_version=facts.latest_version,
            state=self.state,
            latest_state_checkpoint=facts.latest_state_checkpoint,
            create_time=self.create_time,
            trainable_parameters=self.trainable_parameters,
            user_metadata=self.user_metadata,
            adapted_modules=self.adapted_modules,
            damage=tuple(self.damage),
        )

    def to_facts(self) -> dict[str, Any]:
        """Return what survives a restart."""
        return {
            "run_id": self.run_id,
            "tenant": self.tenant,
            "base_model": self.base_model,
            "base_sha256": self.base_sha256,
            **_parameters_to_json(self.parameters),
            "create_time": self.create_time.isoformat(),
            "trainable_parameters": self.trainable_parameters,
            "request_id": self.request_id,
            "request_digest": self.request_digest,
            "user_metadata": self.user_metadata,
            "adapted_modules": self.adapted_modules,
            "step": (self.shown or self.facts()).step,
            "attachment": self.attachment,
            "attached": self.attached,
            "version_limit": self.version_limit,
            "latest_state_checkpoint": self.latest_state_checkpoint,
            "last_seq_id": self.sequencer.last_seq_id,
        }

    @classmethod
    def from_facts(cls, facts: dict[str, Any], sequencer: Sequencer, snapshots: SnapshotStore) -> RunRecord:
        """Restore a run, whose state is not in the engine."""
        parameters = _take_parameters(facts)
        del facts["last_seq_id"]  # the journal knows better
        sequencer.attach(facts.get("attachment", 0))
        if newest := facts.pop("attached_by", ""):  # of a file that knows the newest client alone
            facts["attached"] = {newest: facts["attachment"]}
        return cls(
            sequencer=sequencer,
            snapshots=snapshots,
            parameters=parameters,
            create_time=datetime.fromisoformat(facts.pop("create_time")),
            adapted_modules=tuple(facts.pop("adapted_modules", ())),
            in_engine=False,
            is_restored=False,
            next_version=facts["version_limit"] + 1,
            **facts,
        )


def _parameters_to_json(parameters: RunParameters) -> dict[str, Any]:
    if isinstance(parameters, LoraConfig):
        return {"lora": asdict(parameters)}
    return {"full": {**asdict(parameters), "storage": parameters.storage.name}}


def _take_parameters(facts: dict[str, Any]) -> RunParameters:
    """Read what a run trains, and take it out of the facts."""
    if "lora" in facts:
        lora = facts.pop("lora")
        return LoraConfig(**{**lora, "layers": tuple(lora["layers"])})
    full = facts.pop("full")
    return FullParameters(**{**full, "storage": WeightStorage[full["storage"]]})

"""What is known of a run, and the part of it that survives a restart (run.json)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from paceline.types import LoraConfig, Run, RunState
from trainer_service.runs.sequencer import Sequencer

_FORMAT = 1


@dataclass(slots=True)
class RunRecord:
    """A run as the service holds it."""

    run_id: str
    tenant: str
    base_model: str
    lora: LoraConfig
    create_time: datetime
    trainable_parameters: int
    request_id: str
    request_digest: str
    """Of the CreateRun request, to tell its repetition from another with the same request_id."""
    sequencer: Sequencer
    user_metadata: dict[str, str] = field(default_factory=dict)
    step: int = 0
    latest_version: int = 0
    next_version: int = 1
    """Number of the next version to publish."""
    version_limit: int = 0
    """Version numbers up to this one may be in use when the service stops; a restarted one goes on above it."""
    latest_state_checkpoint: str = ""
    state: RunState = RunState.READY
    in_engine: bool = True
    """Whether the engine holds an adapter for it."""

    @property
    def list_key(self) -> str:
        """Order of lists: time of creation, then id."""
        return f"{self.create_time.timestamp():020.6f} {self.run_id}"

    def public(self) -> Run:
        """Return what clients see."""
        return Run(
            run_id=self.run_id,
            base_model=self.base_model,
            lora=self.lora,
            step=self.step,
            last_seq_id=self.sequencer.last_seq_id,
            latest_version=self.latest_version,
            state=self.state,
            latest_state_checkpoint=self.latest_state_checkpoint,
            create_time=self.create_time,
            trainable_parameters=self.trainable_parameters,
            user_metadata=self.user_metadata,
        )

    def to_json(self) -> bytes:
        """Return what survives a restart."""
        facts: dict[str, Any] = {
            "format": _FORMAT,
            "run_id": self.run_id,
            "tenant": self.tenant,
            "base_model": self.base_model,
            "lora": asdict(self.lora),
            "create_time": self.create_time.isoformat(),
            "trainable_parameters": self.trainable_parameters,
            "request_id": self.request_id,
            "request_digest": self.request_digest,
            "user_metadata": self.user_metadata,
            "step": self.step,
            "version_limit": self.version_limit,
            "latest_state_checkpoint": self.latest_state_checkpoint,
            "last_seq_id": self.sequencer.last_seq_id,
        }
        return json.dumps(facts, indent=2).encode()

    @classmethod
    def from_json(cls, text: bytes, gap_wait_seconds: float) -> RunRecord:
        """Restore a run whose weights in memory are gone."""
        facts = json.loads(text)
        if facts.pop("format") != _FORMAT:
            raise ValueError("run.json was written by another version of this service")
        lora = facts.pop("lora")
        return cls(
            sequencer=Sequencer(facts.pop("last_seq_id"), gap_wait_seconds),
            lora=LoraConfig(**{**lora, "layers": tuple(lora["layers"])}),
            create_time=datetime.fromisoformat(facts.pop("create_time")),
            state=RunState.LOST,
            in_engine=False,
            next_version=facts["version_limit"] + 1,
            **facts,
        )

"""What a restart goes on from: which run it is, and the batch that was pulled and may not be trained yet.

A batch is on disk before it is trained, since the Atropos API server has it no more; with it the number of the run's
last command before it. So a restart knows which of the step's commands were taken, and sends the rest.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PulledBatch:
    """A batch that was pulled."""

    step: int
    """The step that it is for, from 1."""
    after_seq_id: int
    """The run's last command before the step's."""
    groups: list[dict[str, Any]]


class Progress:
    """The files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._run, self._batch = directory / "run.json", directory / "batch.json"

    def run_id(self) -> str:
        """Return the run that was begun; empty where none was."""
        found: str = json.loads(self._run.read_text())["run_id"] if self._run.exists() else ""
        return found

    def begin(self, run_id: str) -> None:
        """Note a new run."""
        _write(self._run, {"run_id": run_id})
        self._batch.unlink(missing_ok=True)

    def pulled(self) -> PulledBatch | None:
        """Return the batch that was pulled and not done with."""
        return PulledBatch(**json.loads(self._batch.read_text())) if self._batch.exists() else None

    def pull(self, batch: PulledBatch) -> None:
        """Keep a batch until `done`."""
        _write(self._batch, {"step": batch.step, "after_seq_id": batch.after_seq_id, "groups": batch.groups})

    def done(self) -> None:
        """Let the batch go."""
        self._batch.unlink(missing_ok=True)


def _write(path: Path, content: object) -> None:
    staging = path.with_suffix(".new")
    with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)

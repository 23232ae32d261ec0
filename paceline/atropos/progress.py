"""State on disk that a restart resumes from: the run, and a pulled batch that may not be trained yet.

A batch is written to disk before it is trained, because the Atropos API server no longer has it, together with the
seq_id of the run's last command before it. A restart can thus tell which of the step's commands were accepted, and
sends the rest.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PulledBatch:
    """A batch pulled from the Atropos API server."""

    step: int
    """The step that trains on it, from 1."""
    after_seq_id: int
    """seq_id of the run's last command before the step."""
    groups: list[dict[str, Any]]


class Progress:
    """The files that record the progress."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._run, self._batch = directory / "run.json", directory / "batch.json"

    def run_id(self) -> str:
        """Return the id of the started run; empty if there is none."""
        found: str = json.loads(self._run.read_text())["run_id"] if self._run.exists() else ""
        return found

    def begin(self, run_id: str) -> None:
        """Record a new run."""
        _write(self._run, {"run_id": run_id})
        self._batch.unlink(missing_ok=True)

    def pulled(self) -> PulledBatch | None:
        """Return the batch that was pulled and is not done, if any."""
        return PulledBatch(**json.loads(self._batch.read_text())) if self._batch.exists() else None

    def pull(self, batch: PulledBatch) -> None:
        """Store a batch until `done`."""
        _write(self._batch, {"step": batch.step, "after_seq_id": batch.after_seq_id, "groups": batch.groups})

    def done(self) -> None:
        """Delete the stored batch."""
        self._batch.unlink(missing_ok=True)


def _write(path: Path, content: object) -> None:
    staging = path.with_suffix(".new")
    with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)

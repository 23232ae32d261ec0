"""What a loop measured in each step of its run, kept on disk as it comes, so that a killed loop loses none of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class StepReport:
    """One row of the table."""

    step: int
    reward: float
    tokens: int
    publish_ms: float
    version: int
    seconds: float


class History:
    """The reports of a run's steps, in a file of the run's own."""

    def __init__(self, directory: Path, run_id: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rewards-{run_id}.json"
        rows = json.loads(self._path.read_text()) if self._path.exists() else []
        self._reports = {row["step"]: StepReport(**row) for row in rows}

    def put(self, report: StepReport) -> None:
        """Keep the report of a step, instead of an earlier one of the same step."""
        self._reports[report.step] = report
        write(self._path, [asdict(one) for one in self._reports.values()])

    def reports(self, taken: int) -> list[StepReport]:
        """Return those of the steps that the run has taken. There may be one of a step that was about to be."""
        return [self._reports[step] for step in sorted(self._reports) if step <= taken]

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def write(path: Path, content: object) -> None:
    """Write JSON, whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1))
    new.replace(path)

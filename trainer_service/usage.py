"""Counts the tokens that tenants train, each once, and keeps the counts on the volume.

A pass is counted when it has executed, and its number is kept with the count: what is executed again, after an engine's
death or a crash, is not counted again. What the files lack after a crash is counted from the journal's answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter

from paceline import errors
from paceline.files.usage_files import Trained, month_files, read_month, write_month
from paceline.log import get_logger
from paceline.rpc.tenant_labels import TenantLabels
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.metrics.passes import adds_gradient
from trainer_service.runs.record import RunRecord

_log = get_logger(__name__)


class UsageLedger:
    """What each tenant has trained, by run and day."""

    def __init__(self, volume: Path, registry: CollectorRegistry) -> None:
        """Keep the counts on `volume`, from `load` on."""
        self._volume = volume
        self._days: dict[str, dict[str, Trained]] = {}
        """By tenant and `Trained.key`."""
        self._newest: dict[str, int] = {}
        """The newest pass that was counted, by run."""
        self._unwritten: set[tuple[str, str]] = set()
        """Tenants and months whose files lack counts."""
        self._is_refused = False
        self._labels = TenantLabels()
        self._tokens = Counter(
            "paceline_trainer_tokens_trained", "Tokens of passes with a gradient", ["tenant"], registry=registry
        )

    def load(self, runs: Iterable[RunRecord]) -> None:
        """Read the files, and count what they lack of the runs. A damaged file is set aside. Raises OSError."""
        for tenant, file in list(month_files(self._volume)):
            for one in self._read(file):
                self._days.setdefault(tenant, {})[one.key] = one
                self._newest[one.run_id] = max(self._newest.get(one.run_id, 0), one.last_seq_id)
        for run in runs:
            for answer in sorted(run.sequencer.answers, key=lambda answer: answer.seq_id):
                is_new = answer.seq_id > self._newest.get(run.run_id, 0)
                if is_new and answer.method == "ForwardBackward" and answer.failure is None and answer.reply:
                    self.passed(run, answer.seq_id, pb.ForwardBackwardResponse.FromString(answer.reply))

    def _read(self, file: Path) -> list[Trained]:
        """Read a file. One that is damaged is renamed, so that the counts from now on do not replace what it holds."""
        try:
            return read_month(file)
        except ValueError as error:
            aside = file.with_name(f"{file.name}.damaged-{uuid4().hex[:8]}")
            file.rename(aside)
            _log.error("usage is damaged and set aside", error=str(error), aside=str(aside))
            return []

    def passed(self, run: RunRecord, seq_id: int, reply: pb.ForwardBackwardResponse) -> None:
        """Count a pass that has executed, unless it was counted or computed no gradient. A run's come in order."""
        if seq_id <= self._newest.get(run.run_id, 0) or not adds_gradient(reply):
            return
        tokens = sum(next(iter(output.tensors["logprobs"].shape), 0) for output in reply.outputs)
        new = Trained(datetime.now(UTC).date().isoformat(), run.run_id, tokens, 1, seq_id)
        days = self._days.setdefault(run.tenant, {})
        if (before := days.get(new.key)) is not None:
            new = replace(new, tokens=before.tokens + tokens, passes=before.passes + 1)
        days[new.key] = new
        self._newest[run.run_id] = seq_id
        self._unwritten.add((run.tenant, new.day[:7]))
        self._tokens.labels(self._labels.of(run.tenant)).inc(tokens)

    def of(self, tenant: str, since: str = "") -> list[Trained]:
        """Return what a tenant has trained from a day on."""
        return [one for one in list(self._days.get(tenant, {}).values()) if one.day >= since]

    def write(self) -> None:
        """Write the files that lack counts. What cannot be written is kept for the next time. Thread-safe."""
        for tenant, month in list(self._unwritten):
            # Removed first: a pass that is counted meanwhile adds it again.
            self._unwritten.discard((tenant, month))
            try:
                write_month(self._volume, tenant, month, (one for one in self.of(tenant) if one.day[:7] == month))
                self._is_refused = False
            except (errors.PacelineError, OSError) as error:
                self._unwritten.add((tenant, month))
                if not self._is_refused:
                    self._is_refused = True
                    _log.warning("usage cannot be written; it is kept in memory until it can", error=str(error))

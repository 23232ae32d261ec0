"""The trainer's own rows: one for each optimizer step, and further ones of a step for what is measured after it.

A row is written by another thread while the run goes on. One that a crash of the service has cut off is written again
from the journal's answers when the run is used or read for the first time, without the times that only the old process
knew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite

from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.weights.v1.weight_service_pb2 import Agreement
from trainer_service.journal.format import AnswerRecord
from trainer_service.metrics.log_file import LogFile
from trainer_service.metrics.passes import Passes, adds_gradient
from trainer_service.metrics.rows import RowSource, StoredRow, stored_values
from trainer_service.metrics.store import MetricsStore
from trainer_service.runs.command import Answer, Outcome
from trainer_service.runs.record import RunRecord

_STEP, _PUBLISH = "OptimStep", "PublishWeights"
_TOLD_BY = frozenset({"ForwardBackward", _STEP, "LoadCheckpoint", _PUBLISH})
"""The commands whose answers rows are made of."""
_KNOWN_VERSIONS = 64
"""Newest versions of a run of which it is known which step they are of."""


@dataclass(frozen=True, slots=True)
class Turn:
    """When a command had its turn in its run."""

    seq_id: int
    step: int
    """Optimizer steps taken by the commands before it."""
    begun: float
    ended: float
    """In seconds of `perf_counter`."""


@dataclass(slots=True)
class _Version:
    """What is known of a published version."""

    step: int | None = None
    begun: float = 0.0
    """When its publish began."""
    is_active: bool = False
    """Whether the first acknowledgement is in a row."""
    acknowledged: float | None = None
    """When it was acknowledged for the first time."""


@dataclass(slots=True)
class _Run:
    """What is known of a run in this process."""

    record: RunRecord
    passes: Passes = field(default_factory=Passes)
    """Those since the last step."""
    begun: float | None = None
    """When the first of them began."""
    stepped: float | None = None
    """When the last step ended."""
    versions: OrderedDict[int, _Version] = field(default_factory=OrderedDict)

    def version(self, number: int) -> _Version:
        found = self.versions.setdefault(number, _Version())
        if len(self.versions) > _KNOWN_VERSIONS:
            self.versions.popitem(last=False)
        return found


class Recorder:
    """Makes rows of commands that executed, of acknowledgements and of comparisons with samplers."""

    def __init__(self, store: MetricsStore) -> None:
        self._store = store
        self._runs: dict[str, _Run] = {}
        self._carried: dict[str, Passes] = {}
        """Passes of an earlier process that no step has applied yet; only the store's writer uses it."""

    def executed(self, run: RunRecord, outcome: Outcome, turn: Turn) -> None:
        """Note a command that was executed and not replayed, in the order of the run's commands.

        Of several executions of a step, which an engine's death or a crash may cause, one makes a row.
        """
        known, reply = self._known(run), outcome.answer
        match reply:
            case pb.ForwardBackwardResponse() if adds_gradient(reply):
                wait = outcome.figures.get("time/wait", 0.0)
                known.passes.add(reply, wait=wait, forward_backward=_milliseconds(turn) - wait)
                known.begun = turn.begun if known.begun is None else known.begun
            case pb.OptimStepResponse() if _is_step(reply):
                self._stepped(known, reply, outcome.figures, turn)
            case pb.OptimStepResponse() | pb.LoadCheckpointResponse():
                self.dropped_gradient(run)
        if outcome.version:
            self._published(known, reply, outcome.version, turn)

    def dropped_gradient(self, run: RunRecord) -> None:
        """Note that the passes since the last step will not be applied by the next one."""
        known = self._known(run)
        known.passes, known.begun = Passes(), None
        self._store.record(run, lambda _: self._forget_carried(run.run_id))

    def acknowledged(self, run_id: str, version: int, at: float) -> None:
        """Note that a sampler has loaded a version, at a time of `perf_counter`."""
        if (known := self._runs.get(run_id)) is not None:
            found = known.version(version)
            if found.acknowledged is None:
                found.acknowledged = at
                self._activated(known, found)

    def compared(self, agreement: Agreement) -> None:
        """Note that a sampler's log-probabilities of a version were compared with the trainer's."""
        known = self._runs.get(agreement.model.run_id)
        version = known.versions.get(agreement.model.version) if known is not None else None
        if known is None or version is None or version.step is None or not agreement.tokens:
            return
        values = {"difference/mean": agreement.mean_difference, "version": float(agreement.model.version)}
        self._write(known, _row(version.step, values))

    async def ready(self, run: RunRecord) -> None:
        """Wait until the rows are written that were made so far, those that a crash has cut off among them."""
        self._known(run)
        await self._store.written()

    @asynccontextmanager
    async def deleting(self, run_id: str) -> AsyncIterator[None]:
        """Write nothing more of a run whose files are deleted in the block."""
        async with self._store.deleting(run_id):
            yield
        self._runs.pop(run_id, None)
        self._carried.pop(run_id, None)

    def _known(self, run: RunRecord) -> _Run:
        """Return what is known of a run; restore its rows if this process has not done so."""
        known = self._runs.get(run.run_id)
        if known is None:
            answers = [answer for answer in run.sequencer.answers if answer.method in _TOLD_BY]
            self._store.record(run, lambda log: self._restore(run.run_id, answers, log))
            known = self._runs[run.run_id] = _Run(run)
        return known

    def _stepped(self, known: _Run, reply: pb.OptimStepResponse, figures: Mapping[str, float], turn: Turn) -> None:
        times = {"time/optim_step": reply.milliseconds}
        if known.begun is not None and known.stepped is not None:
            times["time/between"] = 1e3 * max(0.0, known.begun - known.stepped)
        passes, known.passes, known.begun, known.stepped = known.passes, Passes(), None, turn.ended
        run_id = known.record.run_id

        def make(_: LogFile[StoredRow]) -> Sequence[StoredRow]:
            passes.join(self._carried.pop(run_id, Passes()))
            return [_step_row(reply, passes, {**times, **figures}, turn.seq_id)]

        self._store.record(known.record, make)

    def _published(self, known: _Run, reply: Answer, number: int, turn: Turn) -> None:
        version = known.version(number)
        version.step, version.begun = turn.step, turn.begun
        self._write(known, _publish_row(reply, number, turn.step, turn.seq_id))
        self._activated(known, version)

    def _activated(self, known: _Run, version: _Version) -> None:
        """Write how long it took until a version was active, once both are known: the publish, and the first sampler.

        A sampler may acknowledge a version before its publish has ended.
        """
        if version.is_active or version.acknowledged is None or version.step is None:
            return
        version.is_active = True
        self._write(known, _row(version.step, {"time/publish_active": 1e3 * (version.acknowledged - version.begun)}))

    def _write(self, known: _Run, row: StoredRow) -> None:
        self._store.record(known.record, lambda _: [row])

    def _forget_carried(self, run_id: str) -> Sequence[StoredRow]:
        self._carried.pop(run_id, None)
        return []

    def _restore(self, run_id: str, answers: Sequence[AnswerRecord], log: LogFile[StoredRow]) -> Sequence[StoredRow]:
        """Return the rows that the file lacks at its end, and keep the passes that no step has applied yet."""
        stepped, published = log.newest_command(_STEP), log.newest_command(_PUBLISH)
        rows, passes = list[StoredRow](), Passes()
        for answer in sorted(answers, key=lambda answer: answer.seq_id):
            if answer.method == _PUBLISH:
                if answer.version and answer.seq_id > published:
                    reply = None if answer.reply is None else pb.PublishWeightsResponse.FromString(answer.reply)
                    rows.append(_publish_row(reply, answer.version, answer.counters.step, answer.seq_id))
            elif answer.seq_id > stepped:
                passes = self._restore_one(answer, passes, rows)
        self._carried[run_id] = passes
        return rows

    def _restore_one(self, answer: AnswerRecord, passes: Passes, rows: list[StoredRow]) -> Passes:
        """Add the row of a step to `rows`; return the passes that no step has applied after it."""
        if answer.failure is not None:
            return Passes() if answer.failure.reason == errors.NonFiniteGradient.reason else passes
        if answer.method == "ForwardBackward":
            pass_reply = pb.ForwardBackwardResponse.FromString(answer.reply or b"")
            if adds_gradient(pass_reply):
                passes.add(pass_reply)
            return passes
        step_reply = pb.OptimStepResponse.FromString(answer.reply or b"") if answer.method == _STEP else None
        if step_reply is not None and _is_step(step_reply):
            rows.append(_step_row(step_reply, passes, {"time/optim_step": step_reply.milliseconds}, answer.seq_id))
        return Passes()


def _is_step(reply: pb.OptimStepResponse) -> bool:
    """Return whether a step was taken, and the gradient not discarded."""
    return reply.milliseconds > 0


def _step_row(reply: pb.OptimStepResponse, passes: Passes, figures: Mapping[str, float], seq_id: int) -> StoredRow:
    values = {
        **passes.values(),
        "grad_norm": reply.grad_norm,
        "learning_rate": reply.learning_rate,
        "tokens": float(reply.tokens),
        **figures,
    }
    if passes.sequences and isfinite(passes.forward_backward):
        values |= {"time/wait": passes.wait, "time/forward_backward": passes.forward_backward}
        values["tokens_per_second"] = 1e3 * reply.tokens / (passes.forward_backward + reply.milliseconds)
    return _row(reply.step, values, _STEP, seq_id)


def _publish_row(reply: Answer | None, version: int, step: int, seq_id: int) -> StoredRow:
    values = {"version": float(version)}
    if isinstance(reply, pb.PublishWeightsResponse):
        values["time/publish_stage"] = reply.stage_milliseconds
    return _row(step, values, _PUBLISH, seq_id)


def _row(step: int, values: Mapping[str, float], command: str = "", seq_id: int = 0) -> StoredRow:
    return StoredRow(
        step=step,
        time=datetime.now(UTC),
        source=RowSource.TRAINER,
        command=command,
        seq_id=seq_id,
        values=stored_values(values),
    )


def _milliseconds(turn: Turn) -> float:
    return 1e3 * (turn.ended - turn.begun)

"""Rows and rollouts as MetricsService carries them, and the checks of what a client logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from paceline import errors
from paceline.codec.resources import timestamp_to_proto
from paceline.metrics.v1 import metrics_service_pb2 as pb
from trainer_service.metrics.rows import RowSource, StoredRollout, StoredRow, stored_value, stored_values

_NAME = re.compile(r"[A-Za-z0-9_./:@ -]{1,128}")
_MOST_ROLLOUT_BYTES = 1 << 16
_SOURCES = {RowSource.TRAINER: pb.ROW_SOURCE_TRAINER, RowSource.CLIENT: pb.ROW_SOURCE_CLIENT}


def check_logged(request: pb.LogMetricsRequest) -> None:
    """Check what a client logs. Raises MissingField, InvalidName, OutOfRange."""
    if not request.values and not request.rollouts:
        raise errors.MissingField("is not set, and rollouts neither; log at least one of them", field="values")
    for name in request.values:
        if not _NAME.fullmatch(name):
            message = "must be 1 to 128 characters of letters, digits, spaces and _./:@-"
            raise errors.InvalidName(message, field=f"values[{name}]")
    for index, rollout in enumerate(request.rollouts):
        texts = (rollout.prompt, rollout.completion, *rollout.extras, *rollout.extras.values())
        size = sum(len(text.encode()) for text in texts)
        if size > _MOST_ROLLOUT_BYTES:
            message = f"has {size} bytes of text; at most {_MOST_ROLLOUT_BYTES} are accepted: log a part of it"
            raise errors.OutOfRange(message, field=f"rollouts[{index}]")


def row_of(request: pb.LogMetricsRequest, step: int) -> StoredRow | None:
    """Return the row that a client logs for a step; None if it logs no values."""
    if not request.values:
        return None
    values = stored_values(request.values)
    now = datetime.now(UTC)
    return StoredRow(step=step, source=RowSource.CLIENT, time=now, request_id=request.request_id, values=values)


def rollouts_of(request: pb.LogMetricsRequest, step: int) -> list[StoredRollout]:
    """Return the rollouts that a client logs for a step."""
    now = datetime.now(UTC)
    return [
        StoredRollout(
            step=step,
            time=now,
            request_id=request.request_id,
            prompt=rollout.prompt,
            completion=rollout.completion,
            reward=stored_value(rollout.reward) if rollout.HasField("reward") else None,
            extras=dict(rollout.extras),
        )
        for rollout in request.rollouts
    ]


def rows_to_proto(rows: Iterable[StoredRow]) -> list[pb.MetricsRow]:
    """Encode rows."""
    return [
        pb.MetricsRow(
            number=row.number,
            step=row.step,
            time=timestamp_to_proto(row.time),
            values={name: float(value) for name, value in row.values.items()},
            source=_SOURCES[row.source],
        )
        for row in rows
    ]


def rollout_to_proto(row: StoredRollout) -> pb.RolloutRow:
    """Encode a rollout."""
    reward = None if row.reward is None else float(row.reward)
    rollout = pb.Rollout(prompt=row.prompt, completion=row.completion, reward=reward, extras=row.extras)
    return pb.RolloutRow(number=row.number, step=row.step, time=timestamp_to_proto(row.time), rollout=rollout)

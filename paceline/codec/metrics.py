"""Rows of metrics and rollouts."""

from __future__ import annotations

from paceline.codec.messages import make
from paceline.codec.resources import timestamp_from_proto
from paceline.metrics.v1 import metrics_service_pb2 as pb
from paceline.types.metrics import MetricsRow, Rollout, RolloutRow, RowSource


def metrics_row_from_proto(message: pb.MetricsRow) -> MetricsRow:
    """Decode a row."""
    time = timestamp_from_proto(message.time)
    return MetricsRow(message.number, message.step, time, dict(message.values), RowSource(message.source))


def rollout_to_proto(rollout: Rollout) -> pb.Rollout:
    """Encode a rollout."""
    return make(
        pb.Rollout, prompt=rollout.prompt, completion=rollout.completion, reward=rollout.reward, extras=rollout.extras
    )


def rollout_row_from_proto(message: pb.RolloutRow) -> RolloutRow:
    """Decode a rollout that was logged."""
    logged = message.rollout
    reward = logged.reward if logged.HasField("reward") else None
    rollout = Rollout.with_extras(logged.prompt, logged.completion, reward, logged.extras)
    return RolloutRow(message.number, message.step, timestamp_from_proto(message.time), rollout)

"""Encode and decode what a tenant owns: runs, checkpoints, quotas."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from paceline.codec.training import parameters_from_proto, put_parameters
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, CheckpointKind, Quota, Run, RunState
from paceline.types.v1 import quota_pb2


def run_to_proto(run: Run) -> pb.Run:
    """Encode a run."""
    message = pb.Run(
        run_id=run.run_id,
        base_model=run.base_model,
        step=run.step,
        last_seq_id=run.last_seq_id,
        latest_version=run.latest_version,
        state=pb.RunState.ValueType(run.state.value),
        latest_state_checkpoint=run.latest_state_checkpoint,
        create_time=timestamp_to_proto(run.create_time),
        user_metadata=run.user_metadata,
        trainable_parameters=run.trainable_parameters,
        adapted_modules=run.adapted_modules,
        damage=run.damage,
        executed_seq_id=run.executed_seq_id,
        gradient_tokens=run.gradient_tokens,
        volume_bytes=run.volume_bytes,
        last_use_time=None if run.last_use_time is None else timestamp_to_proto(run.last_use_time),
    )
    put_parameters(message, run.parameters)
    return message


def run_from_proto(message: pb.Run) -> Run:
    """Decode a run."""
    return Run(
        run_id=message.run_id,
        base_model=message.base_model,
        parameters=parameters_from_proto(message),
        step=message.step,
        last_seq_id=message.last_seq_id,
        latest_version=message.latest_version,
        state=RunState(message.state),
        latest_state_checkpoint=message.latest_state_checkpoint,
        create_time=timestamp_from_proto(message.create_time),
        trainable_parameters=message.trainable_parameters,
        user_metadata=dict(message.user_metadata),
        adapted_modules=tuple(message.adapted_modules),
        damage=tuple(message.damage),
        executed_seq_id=message.executed_seq_id,
        gradient_tokens=message.gradient_tokens,
        volume_bytes=message.volume_bytes,
        last_use_time=timestamp_from_proto(message.last_use_time) if message.HasField("last_use_time") else None,
    )


def checkpoint_to_proto(checkpoint: Checkpoint) -> pb.Checkpoint:
    """Encode a checkpoint."""
    expire_time = checkpoint.expire_time
    return pb.Checkpoint(
        path=checkpoint.path,
        run_id=checkpoint.run_id,
        kind=pb.CheckpointKind.ValueType(checkpoint.kind.value),
        name=checkpoint.name,
        step=checkpoint.step,
        size_bytes=checkpoint.size_bytes,
        sha256=checkpoint.sha256,
        blake3=checkpoint.blake3,
        create_time=timestamp_to_proto(checkpoint.create_time),
        expire_time=None if expire_time is None else timestamp_to_proto(expire_time),
        damage=checkpoint.damage,
    )


def checkpoint_from_proto(message: pb.Checkpoint) -> Checkpoint:
    """Decode a checkpoint."""
    expires = message.HasField("expire_time")
    return Checkpoint(
        path=message.path,
        run_id=message.run_id,
        kind=CheckpointKind(message.kind),
        name=message.name,
        step=message.step,
        size_bytes=message.size_bytes,
        sha256=message.sha256,
        blake3=message.blake3,
        create_time=timestamp_from_proto(message.create_time),
        expire_time=timestamp_from_proto(message.expire_time) if expires else None,
        damage=message.damage,
    )


def quota_to_proto(quota: Quota) -> quota_pb2.Quota:
    """Encode a quota."""
    return quota_pb2.Quota(name=quota.name, used=quota.used, limit=quota.limit)


def quota_from_proto(message: quota_pb2.Quota) -> Quota:
    """Decode a quota."""
    return Quota(message.name, message.used, message.limit)


def timestamp_to_proto(moment: datetime) -> Timestamp:
    """Encode a time."""
    message = Timestamp()
    message.FromDatetime(moment.astimezone(UTC))
    return message


def timestamp_from_proto(message: Timestamp) -> datetime:
    """Decode a time, in UTC."""
    return message.ToDatetime(UTC)

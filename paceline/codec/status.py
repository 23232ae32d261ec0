"""The parts of a deployment's status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.codec.models import model_info_from_proto
from paceline.codec.resources import quota_from_proto, timestamp_from_proto
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Run
from paceline.types.status import Disk, Held, Model, Service, Waiting

_VOLUME = "volume_bytes"
_ENDED = {pb.COMMAND_STATE_SUCCEEDED, pb.COMMAND_STATE_REFUSED, pb.COMMAND_STATE_NOT_ARRIVED}


def service_from_proto(told: gateway_pb.ServiceStatus) -> Service:
    """Decode a service."""
    process = told.process
    started = timestamp_from_proto(process.start_time) if told.HasField("process") else None
    return Service(
        told.kind,
        told.sampler_id,
        told.reachable,
        told.service_version,
        started,
        process.memory_bytes,
        process.machine_available_bytes,
        process.machine_total_bytes,
        told.unused_because,
    )


def model_from_proto(told: gateway_pb.SupportedModel) -> Model:
    """Decode a base model."""
    info = model_info_from_proto(told.model)
    certificate = info.certificate.packing.name.lower() if info.certificate else ""
    return Model(info.name, certificate, told.trainable, told.sampleable)


def held_from_proto(info: pb.GetServerInfoResponse, names: Mapping[str, str]) -> list[Held]:
    """Decode the versions that samplers hold; `names` has the names of runs by their ids."""
    return [
        Held(
            watcher.sampler_id,
            held.run_id,
            names.get(held.run_id, ""),
            held.version,
            held.newest,
            held.acknowledged,
        )
        for watcher in info.watchers
        for held in watcher.versions
    ]


def waiting_from_proto(run: Run, statuses: Iterable[pb.CommandStatus]) -> list[Waiting]:
    """Decode those of a run's commands that have not ended."""
    return [
        Waiting(
            run.run_id,
            run.user_metadata.get("name", ""),
            one.seq_id,
            pb.CommandState.Name(one.state).removeprefix("COMMAND_STATE_").lower(),
            one.commands_ahead,
            one.executing_seconds,
        )
        for one in statuses
        if one.state not in _ENDED
    ]


def disk_from_proto(usage: pb.GetUsageResponse) -> Disk:
    """Decode what is left of the checkpoint volume."""
    quota = next((one for one in map(quota_from_proto, usage.quotas) if one.name == _VOLUME), None)
    used = (quota.used, quota.limit) if quota else (0, 0)
    return Disk(usage.volume_free_bytes, usage.volume_total_bytes, *used)

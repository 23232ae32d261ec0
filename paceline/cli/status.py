"""`paceline status`: what runs, what it serves, what waits, and what is left of memory and disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import typer

from paceline import ServiceClient, codec, errors
from paceline.cli.connect import Address, KeyFile, connected
from paceline.cli.output import AsJson, bytes_in_words, seconds_in_words, show_fields, show_json, show_table
from paceline.client.transport import read
from paceline.codec.resources import timestamp_from_proto
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Quota, Run

VOLUME = "volume_bytes"


@dataclass(frozen=True, slots=True)
class Service:
    """A service."""

    kind: str
    sampler_id: str
    reachable: bool
    version: str
    start_time: datetime | None
    memory_bytes: int
    machine_available_bytes: int
    machine_total_bytes: int
    unused_because: str


@dataclass(frozen=True, slots=True)
class Model:
    """A base model."""

    name: str
    certificate: str
    """packed, one_sequence, or empty if the trainer does not answer."""
    trainable: bool
    sampleable: bool


@dataclass(frozen=True, slots=True)
class Held:
    """A version that a watching sampler holds."""

    sampler_id: str
    run_id: str
    run_name: str
    version: int
    newest: bool
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """A command that has not ended."""

    run_id: str
    run_name: str
    seq_id: int
    state: str
    commands_ahead: int
    executing_seconds: float


@dataclass(frozen=True, slots=True)
class Disk:
    """The checkpoint volume."""

    free_bytes: int
    total_bytes: int
    used_bytes: int
    """Those of the caller's tenant."""
    limit_bytes: int
    """The most that the tenant may have; 0 means no limit."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a caller sees of a deployment."""

    address: str
    tenant: str
    services: Sequence[Service]
    models: Sequence[Model]
    watching: Sequence[str]
    """Ids of the samplers that watch the trainer."""
    versions: Sequence[Held]
    queue: Sequence[Waiting]
    disk: Disk | None
    quotas: Sequence[Quota]
    trainer_error: str
    """Why the trainer's part is missing; empty if it is not."""


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the command."""
    app.command("status", rich_help_panel=panel)(status)


def status(address: Address = None, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Show services, models, samplers with their versions, waiting commands, memory and disk."""
    with connected(address, api_key_file, patient=False) as service:
        found = read_status(service)
    if as_json:
        show_json(found)
    else:
        _show(found)


def read_status(service: ServiceClient) -> Status:
    """Ask the gateway and, if it answers, the trainer. Raises what the gateway raises."""
    transport = service.transport
    told = transport.query(transport.gateway.GetCapabilities, gateway_pb.GetCapabilitiesRequest()).result()
    account, failure = service.whoami(), ""
    watching, versions, queue, disk = list[str](), list[Held](), list[Waiting](), None
    try:
        runs = service.list_runs()
        info = transport.query(transport.trainer.GetServerInfo, pb.GetServerInfoRequest()).result()
        usage = transport.query(transport.trainer.GetUsage, pb.GetUsageRequest()).result()
        names = {run.run_id: run.user_metadata.get("name", "") for run in runs}
        watching, versions = [one.sampler_id for one in info.watchers], _held(info, names)
        queue = [one for run in runs if run.last_seq_id > run.executed_seq_id for one in _waiting(service, run)]
        quota = next((one for one in map(codec.quota_from_proto, usage.quotas) if one.name == VOLUME), None)
        used = (quota.used, quota.limit) if quota else (0, 0)
        disk = Disk(usage.volume_free_bytes, usage.volume_total_bytes, *used)
    except (errors.Unavailable, errors.TimedOut) as error:
        failure = str(error)
    return Status(
        transport.connection.address,
        account.tenant,
        [_service(one) for one in told.services],
        [_model(one) for one in told.models],
        watching,
        versions,
        queue,
        disk,
        account.quotas,
        failure,
    )


def _service(told: gateway_pb.ServiceStatus) -> Service:
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


def _model(told: gateway_pb.SupportedModel) -> Model:
    info = codec.model_info_from_proto(told.model)
    certificate = info.certificate.packing.name.lower() if info.certificate else ""
    return Model(info.name, certificate, told.trainable, told.sampleable)


def _held(info: pb.GetServerInfoResponse, names: dict[str, str]) -> list[Held]:
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


def _waiting(service: ServiceClient, run: Run) -> list[Waiting]:
    """Return a run's commands that have not ended."""
    transport, request = service.transport, pb.FollowRequest(run_id=run.run_id, max_seconds=0)

    async def ask() -> list[pb.CommandStatus]:
        call, told = await transport.open_stream(transport.trainer.Follow, request, "query")
        found = list[pb.CommandStatus]()
        try:
            while told is not None:
                found.append(told.status)
                told = await read(call)
        finally:
            transport.end_stream(call)
        return found

    ended = {pb.COMMAND_STATE_SUCCEEDED, pb.COMMAND_STATE_REFUSED, pb.COMMAND_STATE_NOT_ARRIVED}
    return [
        Waiting(
            run.run_id,
            run.user_metadata.get("name", ""),
            one.seq_id,
            pb.CommandState.Name(one.state).removeprefix("COMMAND_STATE_").lower(),
            one.commands_ahead,
            one.executing_seconds,
        )
        for one in transport.submit(ask()).result()
        if one.state not in ended
    ]


def _show(found: Status) -> None:
    columns = ("service", "answers", "version", "up", ">memory", ">machine has left", "note")
    show_table(columns, map(_service_row, found.services), title=f"{found.address}, tenant {found.tenant}")
    models = [(one.name, one.certificate or "unknown", one.trainable, one.sampleable) for one in found.models]
    show_table(("model", "certificate", "trainable", "sampleable"), models, empty="no models")
    if found.trainer_error:
        show_fields([("trainer", found.trainer_error)])
        return
    if not found.watching:
        show_fields([("samplers", "none watches the trainer, so new versions reach none")])
    versions = [
        (one.sampler_id, one.run_name or one.run_id, one.version, one.newest, one.acknowledged)
        for one in found.versions
    ]
    show_table(("sampler", "run", ">version", "newest", "acknowledged"), versions, empty="no sampler holds a version")
    queue = [
        (one.run_name or one.run_id, one.seq_id, one.state, one.commands_ahead, f"{one.executing_seconds:.1f} s")
        for one in found.queue
    ]
    show_table(("run", ">command", "state", ">ahead", ">executing for"), queue, empty="no commands wait")
    if found.disk:
        limit = f" of {bytes_in_words(found.disk.limit_bytes)}" if found.disk.limit_bytes else ""
        left = f"{bytes_in_words(found.disk.free_bytes)} of {bytes_in_words(found.disk.total_bytes)} free"
        show_fields([("disk", f"{left}; this tenant has {bytes_in_words(found.disk.used_bytes)}{limit}")])


def _service_row(one: Service) -> tuple[Any, ...]:
    since = seconds_in_words((datetime.now(UTC) - one.start_time).total_seconds()) if one.start_time else ""
    return (
        f"{one.kind} {one.sampler_id}".strip(),
        one.reachable,
        one.version,
        since,
        bytes_in_words(one.memory_bytes) if one.memory_bytes else "",
        bytes_in_words(one.machine_available_bytes) if one.machine_total_bytes else "",
        one.unused_because,
    )

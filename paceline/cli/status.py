"""`paceline status`: what runs, what it serves, what waits, and what is left of memory and disk."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import typer

from paceline import ServiceClient, errors
from paceline.cli.connect import Address, KeyFile, connected
from paceline.cli.output import AsJson, bytes_in_words, seconds_in_words, show_fields, show_json, show_table
from paceline.client.transport import read
from paceline.codec.status import (
    disk_from_proto,
    held_from_proto,
    model_from_proto,
    service_from_proto,
    waiting_from_proto,
)
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Run
from paceline.types.status import Held, Service, Status, Waiting


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
        watching, versions = [one.sampler_id for one in info.watchers], held_from_proto(info, names)
        queue = [one for run in runs if run.last_seq_id > run.executed_seq_id for one in _waiting(service, run)]
        disk = disk_from_proto(usage)
    except (errors.Unavailable, errors.TimedOut) as error:
        failure = str(error)
    return Status(
        transport.connection.address,
        account.tenant,
        list(map(service_from_proto, told.services)),
        list(map(model_from_proto, told.models)),
        watching,
        versions,
        queue,
        disk,
        account.quotas,
        failure,
    )


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

    return waiting_from_proto(run, transport.submit(ask()).result())


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

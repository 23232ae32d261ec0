"""`paceline doctor`: checks of this machine and of the services, each with a remedy."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from paceline import ServiceClient, __version__, errors
from paceline.cli.connect import Address, KeyFile, connected
from paceline.cli.output import AsJson, CommandFailed, bytes_in_words, show_json, show_table
from paceline.codec.resources import timestamp_from_proto
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.machine import visible_gpus
from paceline.rpc.process_info import process_info

_PACKAGES = {
    "server": ("structlog", "pydantic_settings", "prometheus_client"),
    "trainer": ("torch", "transformers", "peft", "msgspec", "blake3"),
    "sampler": ("vllm",),
    "http": ("fastapi", "uvicorn"),
    "hub": ("huggingface_hub",),
}
"""Modules that tell whether an extra is installed."""
_PORTS = range(4)
"""Ports of a `paceline up` from the gateway's on; its health ports are 100 above."""
_LEAST_MEMORY, _LEAST_DISK = 4 << 30, 5 << 30
_SKEW_SECONDS = 5.0


class Verdict(Enum):
    """What a check found."""

    OK = 1
    WARNING = 2
    """Something does not work, which may not be needed."""
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the command."""
    app.command("doctor", rich_help_panel=panel)(doctor)


def doctor(
    model: Annotated[str, typer.Option(help="Also check this model: a local directory or a Hugging Face id.")] = "",
    state: Annotated[Path, typer.Option(help="Directory of the `paceline up`.")] = Path(".paceline"),
    port: Annotated[int, typer.Option(min=1, max=65000, help="Gateway's port of a `paceline up` here.")] = 50050,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and the services; say of each problem what to do. Exits with 1 if a check failed."""
    checks = [*_machine(state, port), *_model(model), *_services(address, api_key_file)]
    if as_json:
        show_json(checks)
    else:
        rows = [(one.verdict, one.name, one.found, one.remedy) for one in checks]
        show_table(("", "check", "found", "what to do"), rows)
    if any(one.verdict is Verdict.FAILED for one in checks):
        raise typer.Exit(1)


def _machine(state: Path, port: int) -> Iterator[Check]:
    yield _python()
    for extra, modules in _PACKAGES.items():
        missing = [name for name in modules if find_spec(name) is None]
        yield _check(f"extra {extra}", not missing, "installed", f"{', '.join(missing)} missing",
                     f"pip install 'paceline[{extra}]', if this machine needs it", Verdict.WARNING)  # fmt: skip
    memory = process_info()
    if memory.machine_total_bytes:
        left = f"{bytes_in_words(memory.machine_available_bytes)} of {bytes_in_words(memory.machine_total_bytes)} free"
        enough = memory.machine_available_bytes >= _LEAST_MEMORY
        yield _check("memory", enough, left, left, "end other processes, or choose a smaller model", Verdict.WARNING)
    disk = shutil.disk_usage(next(path for path in (state.absolute(), *state.absolute().parents) if path.exists()))
    left = f"{bytes_in_words(disk.free)} of {bytes_in_words(disk.total)} free"
    remedy = "make room, or run `paceline up --state` on another disk"
    yield _check("disk", disk.free >= _LEAST_DISK, left, left, remedy, Verdict.WARNING)
    yield _ports(port)
    gpus = visible_gpus(os.environ)
    yield Check("GPUs", Verdict.OK, f"{len(gpus)}: {', '.join(gpus)}" if gpus else "none; the services use the CPU")
    if sys.platform == "linux":
        yield _libnuma()


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return _check(
        "Python", (3, 11) <= sys.version_info[:2] <= (3, 13), version, version, "use Python 3.11, 3.12 or 3.13"
    )


def _ports(first: int) -> Check:
    taken = [port for base in (first, first + 100) for port in (base + more for more in _PORTS) if _is_taken(port)]
    holders = {_holder(port) or "another user's process" for port in taken}
    found = f"{', '.join(map(str, taken))} taken by {', '.join(sorted(holders))}"
    remedy = "right if that is your `paceline up`; else end it, or give `paceline up --address` another port"
    return _check("ports", not taken, f"{first} to {first + len(_PORTS) - 1} are free", found, remedy, Verdict.WARNING)


def _libnuma() -> Check:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        remedy = "install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora), which vLLM needs on CPUs"
        return Check("libnuma", Verdict.WARNING, "missing", remedy)
    return Check("libnuma", Verdict.OK, "found")


def _model(model: str) -> Iterator[Check]:
    if not model:
        return
    try:
        from paceline.up.checks import check_model  # noqa: PLC0415 - needs the extra server
        from paceline.up.plan import CannotStart  # noqa: PLC0415
    except ModuleNotFoundError as error:
        yield Check("model", Verdict.WARNING, f"not checked: {error.name} is missing", "pip install 'paceline[server]'")
        return
    try:
        check_model(model)
    except CannotStart as failure:
        yield Check("model", Verdict.FAILED, str(failure), "give another directory or id")
    else:
        yield Check("model", Verdict.OK, model)


def _services(address: str | None, key_file: Path | None) -> Iterator[Check]:
    try:
        with connected(address, key_file, patient=False) as service:
            yield from _gateway(service)
    except CommandFailed as failure:
        yield Check("API key", Verdict.FAILED, str(failure), "give another file")


def _gateway(service: ServiceClient) -> Iterator[Check]:
    transport = service.transport
    where, begun = transport.connection.address, datetime.now(UTC)
    try:
        told = transport.query(transport.gateway.GetCapabilities, pb.GetCapabilitiesRequest()).result()
    except errors.InvalidApiKey as error:
        yield Check("gateway", Verdict.OK, f"{where} answers")
        yield Check("API key", Verdict.FAILED, str(error), "set $PACELINE_API_KEY, or ask the operator for a key")
        return
    except errors.PacelineError as error:
        yield Check("gateway", Verdict.FAILED, str(error), "start it, or give its address as --address")
        return
    yield Check("gateway", Verdict.OK, f"{where} answers")
    yield Check("API key", Verdict.OK, "valid")
    yield _clock(told, begun)
    away = [one.kind for one in told.services if not one.reachable]
    unused = [f"{one.sampler_id}: {one.unused_because}" for one in told.services if one.unused_because]
    found = "; ".join([*(f"the {kind} does not answer" for kind in away), *unused])
    yield _check("services", not found, "all answer", found, "see `paceline logs`, or the log of that service")
    versions = {one.service_version for one in told.services if one.reachable} | {__version__}
    found = f"{', '.join(sorted(versions))}; this client is {__version__}"
    yield _check("versions", len(versions) == 1, __version__, found, "upgrade services first, then clients",
                 Verdict.WARNING)  # fmt: skip


def _clock(told: pb.GetCapabilitiesResponse, begun: datetime) -> Check:
    now = timestamp_from_proto(told.time)
    ended = datetime.now(UTC)
    skew = max((begun - now).total_seconds(), (now - ended).total_seconds(), 0.0)
    remedy = "synchronise the clocks (NTP): expiry times and tokens go by them"
    return _check("clock", skew <= _SKEW_SECONDS, "agrees with the gateway's", f"differs by {skew:.0f} s", remedy,
                  Verdict.WARNING)  # fmt: skip


def _check(
    name: str,
    passed: bool,
    good: str,
    bad: str,
    remedy: str,
    otherwise: Verdict = Verdict.FAILED,
) -> Check:
    return Check(name, Verdict.OK, good) if passed else Check(name, otherwise, bad, remedy)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _holder(port: int) -> str:
    """Return the command and id of the process that listens on a port; empty if this user may not know."""
    inodes = set[str]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # listening
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return f"{' '.join(words[:3]).strip()} (process {process.name})"
    return ""

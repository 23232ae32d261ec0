"""What a service tells about its process: since when it runs, and how much memory it and its children have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from paceline.codec.resources import timestamp_to_proto
from paceline.types.v1.process_pb2 import ProcessInfo

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STARTED = datetime.now(UTC)


def process_info() -> ProcessInfo:
    """Describe this process; its memory is unknown where there is no /proc."""
    machine = _machine()
    return ProcessInfo(
        start_time=timestamp_to_proto(_STARTED),
        memory_bytes=sum(map(_resident, _family(os.getpid()))),
        machine_available_bytes=machine.get("MemAvailable", 0),
        machine_total_bytes=machine.get("MemTotal", 0),
    )


def _machine() -> dict[str, int]:
    """Return the machine's memory in bytes by the kernel's names."""
    found = {}
    with suppress(OSError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            found[name] = int(size.split()[0]) << 10
    return found


def _family(pid: int) -> Iterator[int]:
    """Yield a process and those that it started, and so on."""
    yield pid
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _resident(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has just ended
        return 0

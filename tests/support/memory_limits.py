"""Real limits on a process's memory, set from outside."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_of_memory(pid: int, spare: int):
    """Let a process map at most `spare` bytes more than it has."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) << 10
    unlimited = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (used + spare, unlimited[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_DATA, unlimited)

"""Processes that outlive the one that started them, such as vLLM's engine when its sampler is killed.

Process groups do not find them all: torch's launcher puts each rank into a session of its own. So this process becomes
the one that orphans of its descendants go to, and what comes to it that it did not start is left over, and is ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from time import monotonic

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans. Raises OSError where the kernel does not let it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


async def end_orphans(own: Callable[[], Collection[int]], seconds: float) -> bool:
    """Kill the children of this process that are not among `own()`, those that then come to it, and so on.

    Returns False where some are left after so many seconds: the kernel does not end them.
    """
    deadline = monotonic() + seconds
    while left := _children() - set(own()):
        if monotonic() > deadline:
            return False
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 # it does not wait
        await asyncio.sleep(_POLL_SECONDS)
    return True


def _children() -> set[int]:
    """Find the processes whose parent this one is, those that ended and were not asked for their status, too."""
    found, me = set(), str(os.getpid())
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # It is gone.
                # The name of the command, in brackets, may hold anything.
                _state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                found |= {int(entry.name)} if parent == me else set()
    return found

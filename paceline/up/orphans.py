"""End processes that outlive their parent, such as vLLM's engine when its sampler is killed.

Process groups do not cover them all: torch's launcher puts each rank into its own session. This process therefore
becomes the subreaper of its descendants, and kills every child that it did not start itself.
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
    """Make this process the parent of its descendants' orphans. Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


async def end_orphans(own: Callable[[], Collection[int]], seconds: float) -> bool:
    """Kill the children of this process that are not in `own()`, then the orphans these leave, and so on.

    Returns False if some are still alive after `seconds`, because the kernel cannot end them.
    """
    deadline = monotonic() + seconds
    while left := _children() - set(own()):
        if monotonic() > deadline:
            return False
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 # WNOHANG does not block
        await asyncio.sleep(_POLL_SECONDS)
    return True


def _children() -> set[int]:
    """Return the children of this process, including zombies."""
    found, me = set(), str(os.getpid())
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # The process has exited.
                # The command's name, in parentheses, may contain any character.
                _state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                found |= {int(entry.name)} if parent == me else set()
    return found

"""Child processes: a program that runs until it ends by itself, with its parent, or killed; forks; and orphans.

A child is reaped as soon as it ends, even if another process still holds its output open. A linked child has a socket
to its parent as standard input, and ends when it reads the end of that: it does not outlive its parent, however that
dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, Self

_LINK_LIMIT = 1 << 24
"""Bytes of a linked child that may wait unread before it has to wait with writing."""
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Child:
    """A child process that executes Python, until `ended` has its exit status."""

    def __init__(self, process: subprocess.Popen[bytes], *, leads_session: bool = False) -> None:
        self.pid = process.pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status once it has ended and is reaped; negative: the signal that killed it."""
        self._process = process
        self._leads_session = leads_session
        Thread(target=self._await_end, args=(asyncio.get_running_loop(),), daemon=True).start()

    @classmethod
    def start(
        cls,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        output: int | None = None,
        own_session: bool = False,
    ) -> Self:
        """Start `python WORDS`, with this process's environment and output unless others are given.

        In a session of its own, signals of a terminal do not reach it, and `kill` ends its process group.
        """
        process = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=own_session,
        )
        return cls(process, leads_session=own_session)

    @classmethod
    async def start_linked(
        cls, words: Sequence[str], *, environment: Mapping[str, str] | None = None, own_session: bool = False
    ) -> tuple[Self, asyncio.StreamReader, asyncio.StreamWriter]:
        """Start `python WORDS` with a socket as standard input; return the streams of its other end too."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = cls.start(words, environment=environment, stdin=theirs.fileno(), own_session=own_session)
            reader, writer = await asyncio.open_connection(sock=ours, limit=_LINK_LIMIT)
        except BaseException:
            ours.close()  # A child that was started ends with it.
            raise
        return child, reader, writer

    def terminate(self) -> None:
        """Ask it to end, with SIGTERM, if it runs."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it if it runs, with what is left of its process group if it has a session of its own."""
        if self.ended.done():
            return  # Another process, or group, may have its number.
        with suppress(ProcessLookupError):
            if self._leads_session:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.kill()

    async def ends_within(self, seconds: float, unless: asyncio.Event | None = None) -> bool:
        """Wait for its end for at most `seconds`, or until `unless` is set; return whether it has ended."""
        unless_set = asyncio.ensure_future((unless or asyncio.Event()).wait())
        either: set[asyncio.Future[Any]] = {self.ended, unless_set}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unless_set.cancel()
        return self.ended.done()

    async def wait(self) -> int:
        """Wait for its end and return its exit status."""
        return await asyncio.shield(self.ended)

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        # It is reaped in the event loop's thread, so that its number stays its own while that thread may signal it.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):  # The loop is closed; nobody waits.
            loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        status = self._process.wait()
        if not self.ended.done():
            self.ended.set_result(status)


def reason_of_status(status: int) -> str:
    """Return why a process ended with this status, as far as the status says."""
    if status == -signal.SIGKILL:
        return "SIGKILL, usually from the kernel because memory ran out"
    if status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"


def fork(work: Callable[[], object]) -> int:
    """Do `work` in a fork of this process, which then ends, with status 1 if `work` raised; return its process id.

    Locks that other threads own stay locked in the fork.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # runs nothing that this process would run at its end
    return pid


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends. Raises OSError if the kernel refuses."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent (subreaper) of its descendants' orphans. Raises OSError if the kernel refuses.

    Processes may outlive their parent, such as vLLM's engine when its sampler is killed. Process groups do not cover
    them all: torch's launcher puts each rank into its own session.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


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


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

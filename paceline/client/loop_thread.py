"""The process that may use gRPC, and the thread of all its clients, which runs their event loop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from weakref import WeakSet

from paceline import errors


class GrpcOwner:
    """Records which process started gRPC; forked processes inherit a copy.

    gRPC's threads do not survive a fork, so a client in the child would hang.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._users: WeakSet[object] = WeakSet()
        os.register_at_fork(after_in_child=self._keep_users)

    def claim(self, user: object) -> None:
        """Record that this process uses gRPC. Raises Forked if it was forked from a process that does.

        `user` holds its channel, which a forked process then never frees.
        """
        self._pid = self._pid or os.getpid()
        self.check()
        self._users.add(user)

    def check(self) -> None:
        """Raise Forked unless gRPC works in this process."""
        if not self.is_here:
            raise errors.Forked(
                "this process was forked from one that has used a client, so gRPC does not work in it; start it with "
                'multiprocessing.get_context("spawn"), or create the first client after the fork'
            )

    @property
    def is_here(self) -> bool:
        """Whether gRPC was started in this process, or in none of its ancestors."""
        return self._pid in {None, os.getpid()}

    def _keep_users(self) -> None:
        """In a forked process, keep what uses gRPC alive, even while the interpreter ends.

        Freeing the last channel waits for gRPC's thread, and closing one for locks that such a thread may have owned.
        """
        for user in self._users:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(user))


OWNER = GrpcOwner()
"""The owner for this process, shared by all clients, because gRPC is started once per process."""


class LoopThread:
    """The event loop, and its thread, of all clients of this process, because grpc.aio objects belong to one loop.

    The first client starts it, and it runs until the process ends: gRPC delivers events of calls and channels to their
    loop, also after they were closed, and one queue per process delivers those of all loops.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> asyncio.AbstractEventLoop:
        """Return the loop, running."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="paceline-client", daemon=True)
                self._thread.start()
            return self._loop

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread, and so cannot wait for it."""
        return threading.current_thread() is self._thread


THREAD = LoopThread()


def check_may_wait() -> None:
    """Check that a wait for an answer can end. Raises Forked in a forked process, Unsupported on THREAD."""
    OWNER.check()
    if THREAD.is_current:
        raise errors.Unsupported(
            "this is the thread of all clients, which runs the callbacks of futures; it cannot wait for an answer that "
            "it must fetch itself. Wait on another thread, or give the call's own future a callback"
        )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()

"""Detect forked processes: gRPC's threads do not survive a fork, so a client in the child would hang."""

from __future__ import annotations

import os

from paceline import errors


class GrpcOwner:
    """Records which process started gRPC; forked processes inherit a copy."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def claim(self) -> None:
        """Record that this process uses gRPC. Raises Forked if it was forked from a process that does."""
        self._pid = self._pid or os.getpid()
        self.check()

    def check(self) -> None:
        """Raise Forked unless gRPC works in this process."""
        if not self.is_here:
            raise errors.Forked(
                "this process was forked from one that has used a client, and gRPC does not work in it; start it by "
                'multiprocessing.get_context("spawn"), or make the first client after the fork'
            )

    @property
    def is_here(self) -> bool:
        """Whether gRPC was started in this process, or in none of its ancestors."""
        return self._pid in {None, os.getpid()}


OWNER = GrpcOwner()
"""The owner for this process, shared by all clients, because gRPC is started once per process."""

"""Processes made by a fork: gRPC's threads stay behind in the parent, so a client in the child would wait for ever."""

from __future__ import annotations

import os

from paceline import errors


class GrpcOwner:
    """Which process has started gRPC; a copy of that knowledge goes into every process forked from it."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def claim(self) -> None:
        """Note that this process uses gRPC. Raises Forked in one that was forked from a process that does."""
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
        """Whether gRPC was started in this very process, or in none of its ancestors."""
        return self._pid in {None, os.getpid()}


OWNER = GrpcOwner()
"""That of this process: gRPC is started once in it, whatever the number of clients."""

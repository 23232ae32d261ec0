"""Cancellation of tasks that wait for gRPC calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc


@contextmanager
def keep_cancellation() -> Iterator[None]:
    """Raise CancelledError instead of the failure of a call, if the task was cancelled meanwhile.

    For calls that are tried again when they fail: where a task is cancelled while grpc.aio opens a stream, and the
    connection fails at that moment, grpc.aio raises the failure and the cancellation is lost.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except grpc.aio.AioRpcError:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise

"""Cancellation of tasks that try a gRPC call again and again."""

from __future__ import annotations

import asyncio


def check_cancelled() -> None:
    """Raise CancelledError if the current task is being cancelled.

    For loops that try again when a gRPC call fails: where a task is cancelled while grpc.aio opens a stream, and the
    connection fails at that moment, grpc.aio raises the failure and the cancellation is lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError

"""Cancellation of tasks that wait for gRPC calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc


@contextmanager
def keep_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end of a call, if the task was cancelled meanwhile.

    For calls that are made again when they fail or end: where a task is cancelled while grpc.aio opens a stream that
    fails or ends at that moment, the cancellation is lost.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    failure = None
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = error
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    if failure is not None:
        raise failure

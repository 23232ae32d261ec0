"""Retries of a client's calls."""

from __future__ import annotations

import asyncio

import grpc

from paceline.client.connection import RetryPolicy
from paceline.client.retry import RetryLog, with_retries


async def test_a_call_that_fails_at_the_moment_of_its_cancellation_is_not_tried_again():
    attempts = []

    async def attempt():
        attempts.append(1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # as grpc.aio does for a stream that it opens
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()) from None

    running = asyncio.create_task(with_retries(attempt, RetryPolicy(), RetryLog(), "SampleStream"))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()
    assert len(attempts) == 1


async def test_a_call_that_a_cancelled_task_makes_to_clean_up_is_tried_again():
    attempts = []

    async def attempt():
        attempts.append(1)
        if len(attempts) == 1:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await with_retries(attempt, RetryPolicy(), RetryLog(), "SampleStream")

    running = asyncio.create_task(work())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()
    assert len(attempts) == 2

"""A command sent with Execute and watched with Follow, by a client that leaves its streams at random."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc

from paceline import errors
from paceline.codec.commands import execute_request, reply_in
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CommandState

_PAUSE_SECONDS = 0.02


async def execute_and_follow(stub: Any, command: Any, metadata: Any, random: Random) -> Any:
    """Have a command executed once, whatever happens to its streams; return its reply.

    Raises the error of a refusal, and AssertionError if the trainer forgets a command that it has told to be durable.
    """
    execute = execute_request(command, command.run_id, command.seq_id, 0)
    follow = pb.FollowRequest(run_id=command.run_id, seq_ids=[command.seq_id])
    state = CommandState.NOT_ARRIVED
    while True:
        # A stream that broke before its first status says nothing: the command may have arrived.
        is_sent_again = not state.is_durable and (state is CommandState.NOT_ARRIVED or random.random() < 0.5)
        if is_sent_again:
            execute.ClearField("max_seconds")
            if random.random() < 0.5:
                execute.max_seconds = random.choice((0.0, 0.05))
        call = stub.Execute(execute, metadata=metadata) if is_sent_again else stub.Follow(follow, metadata=metadata)
        is_broken = False
        try:
            async for status in _until_left(call, random):
                assert not status.is_another, f"command {command.seq_id} is told to be another one"
                earlier, state = state, CommandState(status.state)
                is_kept = state.is_durable or state is CommandState.UNKNOWN
                assert is_kept or not earlier.is_durable, f"command {command.seq_id} went from {earlier} to {state}"
                if state.has_ended and state is not CommandState.NOT_ARRIVED:
                    return reply_in(status)
        except grpc.aio.AioRpcError as failure:
            error, is_broken = error_from_rpc(failure), True
            if not (isinstance(error, errors.Unavailable | errors.TimedOut) or error.retry_after is not None):
                raise error from None
        finally:
            call.cancel()
        if is_broken:
            state = state if state.is_durable else CommandState.HELD
        await asyncio.sleep(_PAUSE_SECONDS)


async def _until_left(call: Any, random: Random) -> AsyncIterator[pb.CommandStatus]:
    """Yield the statuses of a stream until it ends, or its reader leaves it."""
    async for reply in call:
        yield reply.status
        if random.random() < 0.3:
            return

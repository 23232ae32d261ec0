"""Interceptors for all four kinds of call, written as an async context manager around the handler."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from inspect import isasyncgenfunction
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from paceline import errors
from paceline.rpc.bounds import check_message, check_size, check_wire, is_command, request_of
from paceline.rpc.readers import READER_SECONDS, current_reader, reading
from paceline.rpc.status import StatusNotSentError

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

MESSAGE_SECONDS = 60.0
"""How long the message of an admitted call may take to arrive."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call in progress."""

    method: str
    """/package.Service/Method."""
    context: Context

    def metadata(self, key: str) -> str | None:
        """Return the caller's value for a metadata key, or None."""
        found = next((value for name, value in self.context.invocation_metadata() or () if name == key), None)
        return found if isinstance(found, str) else None


class AroundInterceptor(grpc.aio.ServerInterceptor, ABC):
    """Base of interceptors: `around` runs up to its yield before the handler, and from there after it.

    It is entered when a call's headers have arrived. The message is read after that, inside `around`: a call that is
    refused has no body in memory, and an unreadable message is an error like any other. The messages of a response
    stream must be read in time.
    """

    reader_seconds = READER_SECONDS
    """How long a message of a response stream may wait until it is read."""

    @abstractmethod
    def around(self, call: Call) -> AbstractAsyncContextManager[None]:
        """Return the context manager around one call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the next handler, whatever its kind. A method without a handler fails inside `around` too."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details) or grpc.unary_unary_rpc_method_handler(_unknown)
        # On the wire a single message is a stream of one. Only stream handlers start before the message has arrived.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(handler, method), None, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(self._unary(handler, method), None, handler.response_serializer)

    def _unary(self, handler: Handler, method: str) -> Callable[..., Awaitable[Any]]:
        inner, read = _behavior(handler), _reader(handler, method)

        async def behavior(messages: AsyncIterator[bytes], context: Context) -> Any:
            async with _ended_by_status(), self.around(Call(method, context)):
                return await inner(await read(messages, context), context)

        return behavior

    def _stream(self, handler: Handler, method: str) -> Callable[..., Awaitable[None]]:
        inner, read = _behavior(handler), _reader(handler, method)

        # A handler that writes instead of yielding ends in the task in which it started. If a call is cancelled between
        # two messages, the server drops a generator, whose cleanup would run later, in another context.
        async def behavior(messages: AsyncIterator[bytes], context: Context) -> None:
            async with _ended_by_status(), self.around(Call(method, context)):
                request = await read(messages, context)
                async with reading(context, self.reader_seconds):
                    if not isasyncgenfunction(inner):
                        await inner(request, context)
                        return
                    async with aclosing(inner(request, context)) as responses:
                        write = current_reader().write
                        async for response in responses:
                            await write(response)

        return behavior


@asynccontextmanager
async def _ended_by_status() -> AsyncIterator[None]:
    """End a call whose status is being sent. gRPC accepts only its own AbortError, which it raises after sending."""
    try:
        yield
    except StatusNotSentError as error:
        raise asyncio.CancelledError from error


class Chain(AroundInterceptor):
    """Several interceptors in one, the first outermost. Nesting by the server would cost each call more."""

    def __init__(self, *interceptors: AroundInterceptor, reader_seconds: float = READER_SECONDS) -> None:
        self._interceptors = interceptors
        self.reader_seconds = reader_seconds

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        async with AsyncExitStack() as entered:
            for interceptor in self._interceptors:
                await entered.enter_async_context(interceptor.around(call))
            yield


def _reader(handler: Handler, method: str) -> Callable[[AsyncIterator[bytes], Context], Awaitable[Any]]:
    """Return a function that reads a handler's request within its bounds: a message, or an iterator of messages."""
    decode, contract = handler.request_deserializer, request_of(method)

    def decoded(message: bytes) -> Any:
        if contract is not None:
            check_size(len(message), contract)
        if decode is None:
            return message
        if contract is not None:
            check_wire(message, contract)
        try:
            request = decode(message)
        except DecodeError as error:
            raise errors.UnreadableMessage("the message cannot be parsed; compare it with the contract") from error
        if isinstance(request, Message) and not (contract is not None and is_command(contract)):
            check_message(request)
        return request

    async def one(messages: AsyncIterator[bytes], context: Context) -> Any:
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                message = await context.read()
        except TimeoutError as error:
            raise errors.TimedOut(f"the message did not arrive within {MESSAGE_SECONDS:g} s") from error
        if message is grpc.aio.EOF:
            raise errors.UnreadableMessage("the message is missing; a call of this method sends one")
        return decoded(message)

    async def many(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        return messages if decode is None else each(messages)

    async def each(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            yield decoded(message)

    return many if handler.request_streaming else one


def _behavior(handler: Handler) -> Callable[..., Any]:
    behavior = (
        (handler.stream_stream if handler.response_streaming else handler.stream_unary)
        if handler.request_streaming
        else (handler.unary_stream if handler.response_streaming else handler.unary_unary)
    )
    if behavior is None:
        raise TypeError("the handler's kind and its behavior disagree")
    return behavior


async def _unknown(message: bytes, context: Context) -> bytes:
    raise errors.Unsupported("no such method; compare the versions of client and service")

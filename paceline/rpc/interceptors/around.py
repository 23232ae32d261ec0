"""One shape for interceptors of all four kinds of call: an async context manager around the handler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from inspect import isasyncgenfunction
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
_Make = Callable[..., "grpc.RpcMethodHandler[Any, Any]"]


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
    """Base of interceptors: `around` runs before the handler up to its yield, and after it from there."""

    @abstractmethod
    def around(self, call: Call) -> AbstractAsyncContextManager[None]:
        """Surround one call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler that comes next, whatever its kind."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        make, inner = _parts(handler)
        wrapped = self._stream(inner, method) if handler.response_streaming else self._unary(inner, method)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _unary(self, inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def behavior(request: Any, context: Context) -> Any:
            async with self.around(Call(method, context)):
                return await inner(request, context)

        return behavior

    def _stream(self, inner: Callable[..., Any], method: str) -> Callable[..., Awaitable[None]]:
        # A handler that writes instead of yielding ends in the task it began in. Of calls that are cancelled between
        # two messages the server drops the generator, and its clean-up would run later, in another context.
        async def behavior(request: Any, context: Context) -> None:
            async with self.around(Call(method, context)):
                if not isasyncgenfunction(inner):
                    await inner(request, context)
                    return
                async with aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

        return behavior


class Chain(AroundInterceptor):
    """Several in one, the first outermost. The server's own nesting costs each call more."""

    def __init__(self, *interceptors: AroundInterceptor) -> None:
        self._interceptors = interceptors

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        async with AsyncExitStack() as entered:
            for interceptor in self._interceptors:
                await entered.enter_async_context(interceptor.around(call))
            yield


def _parts(handler: grpc.RpcMethodHandler[Any, Any]) -> tuple[_Make, Callable[..., Any]]:
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, _present(handler.stream_stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, _present(handler.stream_unary)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, _present(handler.unary_stream)
    return grpc.unary_unary_rpc_method_handler, _present(handler.unary_unary)


def _present(behavior: Callable[..., Any] | None) -> Callable[..., Any]:
    if behavior is None:
        raise TypeError("the handler's kind and its behavior disagree")
    return behavior

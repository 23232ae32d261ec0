"""Interceptors for all four kinds of call: logging, metrics, errors and, between services, authentication.

    call ── Chain ── LoggingInterceptor ── MetricsInterceptor ── ErrorInterceptor ── the service's own ── handler

While tracing is on, TracingInterceptor is the first.

Each is an async context manager around the handler. It is entered when a call's headers have arrived. The message is
read after that, inside all of them: a call that is refused has no body in memory, and an unreadable message is an error
like any other.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from inspect import isasyncgenfunction
from time import perf_counter
from typing import Any, TypeAlias, cast
from uuid import uuid4

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from structlog.contextvars import bound_contextvars

from paceline import errors, tracing
from paceline.log import get_logger
from paceline.requests.bodies import decoded
from paceline.requests.tenant_limits import HeardLimits
from paceline.rpc.bounds import parse_request, request_of
from paceline.rpc.identity import (
    CREDENTIAL_KEY,
    DEFAULT_TENANT,
    LIMITS_KEY,
    PEER_TENANT,
    REQUEST_ID_KEY,
    TENANT_KEY,
    Identity,
    is_tenant,
    set_identity,
)
from paceline.rpc.readers import READER_SECONDS, current_reader, reading
from paceline.rpc.status import STATUS_CODES, StatusNotSentError, abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_KINDS = {False: "unary", True: "stream"}
_MESSAGE_SECONDS = 60.0
"""How long the message of an admitted call may take to arrive."""
_MAX_RPC = 64
"""Most characters of a method's name that are logged, because a caller may send any name."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OTHER = "other"
"""Label of calls to methods that the service does not have."""
BUCKET_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300)
"""Bounds of the histograms of calls."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A call in progress."""

    method: str
    """/package.Service/Method."""
    context: Context
    metadata: Mapping[str, str]
    """The caller's metadata that is text; of a key that is given twice, the first value."""


class AroundInterceptor(grpc.aio.ServerInterceptor, ABC):
    """Base of interceptors: `around` runs up to its yield before the handler, and from there after it.

    The messages of a response stream must be read in time.
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
        kind = f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"
        inner, read = getattr(handler, kind), _reader(handler, method)

        async def unary(messages: AsyncIterator[bytes], context: Context) -> Any:
            async with self._entered(method, context):
                return await inner(await read(messages, context), context)

        # A handler that writes instead of yielding ends in the task in which it started. If a call is cancelled between
        # two messages, the server drops a generator, whose cleanup would run later, in another context.
        async def stream(messages: AsyncIterator[bytes], context: Context) -> None:
            async with self._entered(method, context):
                request = await read(messages, context)
                async with reading(context, self.reader_seconds):
                    if not isasyncgenfunction(inner):
                        await inner(request, context)
                        return
                    async with aclosing(inner(request, context)) as responses:
                        write = current_reader().write
                        async for response in responses:
                            await write(response)

        # On the wire a single message is a stream of one. Only stream handlers start before the message has arrived.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)

    @asynccontextmanager
    async def _entered(self, method: str, context: Context) -> AsyncIterator[None]:
        """Enter `around`. A call whose status is being sent is cancelled.

        gRPC accepts only its own AbortError, which it raises after sending.
        """
        pairs = reversed(tuple(context.invocation_metadata() or ()))
        metadata = {key: value for key, value in pairs if isinstance(value, str)}
        try:
            async with self.around(Call(method, context, metadata)):
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

    async def one(messages: AsyncIterator[bytes], context: Context) -> Any:
        try:
            async with asyncio.timeout(_MESSAGE_SECONDS):
                message = await context.read()
        except TimeoutError as error:
            raise errors.TimedOut(f"the message did not arrive within {_MESSAGE_SECONDS:g} s") from error
        if message is grpc.aio.EOF:
            raise errors.UnreadableMessage("the message is missing; a call of this method sends one")
        if decode is None:
            return parse_request(message, contract, decode)
        return await decoded(len(message), parse_request, message, contract, decode)

    async def many(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        return messages if decode is None else (parse_request(message, contract, decode) async for message in messages)

    return many if handler.request_streaming else one


async def _unknown(message: bytes, context: Context) -> bytes:
    raise errors.Unsupported("no such method; compare the versions of client and service")


class TracingInterceptor(AroundInterceptor):
    """Makes each call a span, a part of the caller's if it names one; lines logged during the call name the trace."""

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        name = call.method.rpartition("/")[2][:_MAX_RPC]
        with (
            tracing.continued(call.metadata.get(tracing.TRACEPARENT_KEY, "")),
            tracing.span(name) as span,
            bound_contextvars(trace=tracing.trace_of(tracing.current())),
        ):
            try:
                yield
            except BaseException as error:
                span.set(code=_outcome(error, call))
                raise


class LoggingInterceptor(AroundInterceptor):
    """Logs the method, code and milliseconds of every call; a request id is on every line logged during the call."""

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        request_id = request_id_of(call.metadata.get(REQUEST_ID_KEY, ""))
        start, code = perf_counter(), "OK"
        with bound_contextvars(request_id=request_id, rpc=call.method.rpartition("/")[2][:_MAX_RPC]):
            try:
                yield
            except BaseException as error:
                code = _outcome(error, call)
                raise
            finally:
                log = _log.info if code in {"OK", "CANCELLED"} else _log.warning
                log("call", code=code, ms=round(1e3 * (perf_counter() - start), 2))


def request_id_of(given: str) -> str:
    """Return a caller's request id if it may be logged, or a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex


class MetricsInterceptor(AroundInterceptor):
    """Counts calls by method and code, and times them, in Prometheus metrics."""

    def __init__(self, registry: CollectorRegistry, methods: Collection[str]) -> None:
        """`methods` are counted by name, as /package.Service/Method; all others share one label.

        Names come from callers, and each label lasts as long as the process.
        """
        self._methods = frozenset(methods)
        self._handled = Counter("paceline_rpc_handled_total", "Calls that ended", ["method", "code"], registry=registry)
        self._seconds = Histogram(
            "paceline_rpc_seconds", "Time that calls took", ["method"], buckets=BUCKET_SECONDS, registry=registry
        )
        self._in_flight = Gauge("paceline_rpc_in_flight", "Calls in progress", ["method"], registry=registry)

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        start, code = perf_counter(), "OK"
        method = call.method if call.method in self._methods else _OTHER
        self._in_flight.labels(method).inc()
        try:
            yield
        except BaseException as error:
            code = _outcome(error, call)
            raise
        finally:
            self._in_flight.labels(method).dec()
            self._handled.labels(method, code).inc()
            self._seconds.labels(method).observe(perf_counter() - start)


def _outcome(error: BaseException, call: Call) -> str:
    """Return the name of the status code of a call that raised `error`."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED"
    code = cast("grpc.StatusCode | int | None", call.context.code())
    if not isinstance(code, grpc.StatusCode):
        code = STATUS_CODES.get(code or grpc.StatusCode.UNKNOWN.value[0], grpc.StatusCode.UNKNOWN)
    return code.name


class ErrorInterceptor(AroundInterceptor):
    """Sends errors as the catalog defines them, and any other exception as INTERNAL with an id, without its text."""

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        try:
            yield
        except errors.PacelineError as error:
            await abort(call.context, error)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:
            # A message could not be sent: the caller disconnected while the message was queued.
            raise asyncio.CancelledError from error
        except Exception:
            unforeseen = errors.Internal.unforeseen()
            _log.exception("uncaught", rpc=call.method, error_id=unforeseen.error_id)
            await abort(call.context, unforeseen)


class CredentialInterceptor(AroundInterceptor):
    """Admits callers with the credential that services share, and trusts the tenant that they name.

    Without a credential (a service that runs insecurely) every caller is admitted; one that names no tenant is the
    default tenant.
    """

    def __init__(self, credential: str, limits: HeardLimits | None = None) -> None:
        """`limits` gets the limits that the gateway gives for a call's tenant."""
        self._credential = credential.encode()
        self._limits = limits

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        tenant = call.metadata.get(TENANT_KEY)
        if self._credential:
            given = call.metadata.get(CREDENTIAL_KEY, "").encode()
            if not hmac.compare_digest(given, self._credential) or tenant is None:
                raise errors.MissingCredential(
                    "this service accepts calls only from the gateway and its other services: call the gateway, or "
                    "have the operator set the same credential for all services"
                )
        if tenant not in {None, PEER_TENANT} and not is_tenant(tenant):
            raise errors.MissingCredential(f"the metadata {TENANT_KEY} is not a tenant's name; call the gateway")
        set_identity(Identity(DEFAULT_TENANT if tenant is None else tenant))
        # A sampler that calls for a tenant sends none: it must not undo what the gateway said.
        if self._limits is not None and tenant and (limits := call.metadata.get(LIMITS_KEY)) is not None:
            self._limits.hear(tenant, limits)
        yield

"""Forward calls as bytes. Only metadata is read, never a message, so a new method needs no change here.

    caller ──► server ──► interceptors ──► Proxy ──► Router ──► Upstream ──► service

Forwarded unchanged: messages, deadline, cancellation (both ways), metadata, status code, details, trailers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache, partial
from time import monotonic
from typing import Any

import grpc
from structlog.contextvars import get_contextvars

from paceline import errors
from paceline.gateway.v1 import gateway_service_pb2
from paceline.log import get_logger
from paceline.rpc.channel import TlsFiles, open_channel
from paceline.rpc.identity import API_KEY_KEY, REQUEST_ID_KEY, ROUTE_KEY, current_identity, peer_metadata
from paceline.rpc.readers import current_reader
from paceline.rpc.status import DETAILS_KEY, error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2
from paceline.trainer.v1 import trainer_service_pb2
from paceline.waiting_bytes import WaitingBytes
from paceline.weights.v1 import weight_service_pb2

SERVICES = {
    service.full_name: service
    for file in (gateway_service_pb2, trainer_service_pb2, sampler_service_pb2, weight_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
"""Descriptors of all reachable services, by full name."""

_METHODS = {f"/{name}/{method.name}": method for name, service in SERVICES.items() for method in service.methods}
_TRAINER = ("/paceline.trainer.v1.", "/paceline.weights.v1.")
_SAMPLER = "/paceline.sampler.v1."
_ROUTED = frozenset(
    _SAMPLER + f"SamplerService/{name}"
    for name in ("Sample", "SampleStream", "ComputeLogprobs", "CompleteText", "LoadVersion")
)
"""The methods after which a sampler holds the version that it was asked for."""
_MAX_KEYS = 4096

_OWN = (API_KEY_KEY, REQUEST_ID_KEY, "user-agent", "host", "te", "content-type")
_OWN_PREFIXES = ("x-paceline-", "grpc-", ":")

_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
"""Statuses that gRPC itself gives for a service that is not there, or that stops and ends its calls."""
_READY = grpc.ChannelConnectivity.READY
_START_SECONDS = 60.0
"""How long a service may take to come up before it counts as down."""
_CONNECTING = {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING}
_log = get_logger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Metadata = Sequence[tuple[str, str | bytes]]
UnaryCall = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
ResponseStreamCall = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
StreamCall = grpc.aio.StreamStreamMultiCallable[bytes, bytes]

RouteKey = tuple[str, str]
"""A tenant and the version or checkpoint that it named in the route metadata."""


class Proxy(grpc.GenericRpcHandler):
    """Handles every method of Paceline's services that has no other handler."""

    def __init__(self, router: Router, credential: str, waiting_bytes: WaitingBytes) -> None:
        """`credential` authenticates the gateway to the services; empty if they run insecurely."""
        self._waiting_bytes = waiting_bytes
        self._router = router
        self._credential = credential

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = handler_call_details.method
        if not method.startswith("/paceline."):
            return None
        known = _METHODS.get(method)
        # On the wire every method is a bidirectional stream, so a method of unknown kind can be forwarded as one. The
        # other kinds are cheaper and keep the status of an early failure: in a stream, the write that the failure
        # interrupts would replace it.
        if known is None or known.client_streaming:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, method))
        if known.server_streaming:
            return grpc.unary_stream_rpc_method_handler(partial(self._response_stream, method))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, method))

    async def _unary(self, method: str, request: bytes, context: Context) -> bytes:
        async with self._forwarded(method, lambda upstream: upstream.unary, request, context) as call:
            return await call  # type: ignore[no-any-return]

    async def _response_stream(self, method: str, request: bytes, context: Context) -> None:
        async with self._forwarded(method, lambda upstream: upstream.response_stream, request, context) as call:
            await _pass_on(call)

    async def _stream(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        async with self._forwarded(method, lambda upstream: upstream.stream, requests, context) as call:
            await _pass_on(call)

    @asynccontextmanager
    async def _forwarded(
        self,
        method: str,
        kind: Callable[[Upstream], Callable[[str], Callable[..., Any]]],
        request: bytes | AsyncIterator[bytes],
        context: Context,
    ) -> AsyncIterator[Any]:
        """Yield the call of a service, and pass on its trailers or its failure when the block ends."""
        tenant = current_identity().tenant
        given: Metadata = tuple(context.invocation_metadata() or ())
        route = next((value for name, value in given if name == ROUTE_KEY and isinstance(value, str)), None)
        key = None if route is None or method not in _ROUTED else (tenant, route)
        metadata = [pair for pair in given if pair[0] not in _OWN and not pair[0].startswith(_OWN_PREFIXES)]
        metadata += peer_metadata(self._credential, tenant)
        if request_id := get_contextvars().get("request_id"):
            metadata.append((REQUEST_ID_KEY, request_id))
        if route is not None:
            metadata.append((ROUTE_KEY, route))
        upstream = self._router.choose(method, key)
        with self._waiting_bytes.waiting(tenant, len(request)) if isinstance(request, bytes) else nullcontext():
            call = kind(upstream)(method)(request, timeout=context.time_remaining(), metadata=metadata)
            try:
                with self._router.tracked(call, upstream, key):
                    yield call
                    if trailing := tuple(await call.trailing_metadata()):
                        context.set_trailing_metadata(trailing)
            except grpc.aio.AioRpcError as failure:
                if error := gateway_error(failure, upstream):
                    raise error from failure
                passed: Any = tuple(failure.trailing_metadata() or ())
                await context.abort(failure.code(), failure.details() or "", passed)


async def _pass_on(responses: AsyncIterable[bytes]) -> None:
    write = current_reader().write
    async for response in responses:
        await write(response)


def gateway_error(failure: grpc.aio.AioRpcError, upstream: Upstream) -> errors.PacelineError | None:
    """Return the error to report in place of a service's: it is unreachable, or it refuses the gateway's credential.

    None means that the service's own error is passed on.
    """
    code, trailing = failure.code(), failure.trailing_metadata() or ()
    if code in _AWAY and not any(name == DETAILS_KEY for name, _ in trailing):
        return errors.UpstreamUnavailable(f"the {upstream.name} cannot be reached; try again")
    if code is grpc.StatusCode.UNAUTHENTICATED and isinstance(error_from_rpc(failure), errors.MissingCredential):
        remedy = f"the operator has to set the same credential for the gateway and the {upstream.name}"
        return errors.MissingCredential(f"the {upstream.name} refuses the gateway's credential; {remedy}")
    return None


class Router:
    """Chooses a service for each call.

    The package in the method's name selects the service. Reachable samplers come first, and among them the one with the
    fewest calls in flight. A sampler that has not served the version yet counts as having `spill_in_flight` more calls,
    because it would have to load the version.
    """

    def __init__(self, trainer: Upstream, samplers: Sequence[Upstream], spill_in_flight: int) -> None:
        self.trainer = trainer
        self.samplers = samplers
        self._spill = spill_in_flight
        self._holders = Holders(_MAX_KEYS)

    def choose(self, method: str, key: RouteKey | None) -> Upstream:
        """Return the service that handles a method. Raises Unsupported for an unknown package."""
        if method.startswith(_TRAINER):
            return self.trainer
        if not method.startswith(_SAMPLER):
            raise errors.Unsupported(f"no service behind the gateway has {method}")
        holders = self._holders.of(key) if key else frozenset()

        def rank(sampler: Upstream) -> tuple[bool, int]:
            return not sampler.ready, sampler.in_flight + (0 if sampler in holders else self._spill)

        return min(self.samplers, key=rank)

    @contextmanager
    def tracked(self, call: grpc.aio.Call, upstream: Upstream, key: RouteKey | None) -> Iterator[None]:
        """Count a call while the block runs, record whether its sampler served its version, then cancel the call."""
        upstream.in_flight += 1
        try:
            yield
        except (grpc.aio.AioRpcError, errors.Unavailable) as failure:
            is_away = not isinstance(failure, grpc.aio.AioRpcError) or failure.code() in _AWAY
            if key and is_away:
                self._holders.discard(key, upstream)
            raise
        else:
            if key:
                self._holders.add(key, upstream)
        finally:
            upstream.in_flight -= 1
            call.cancel()


class Holders:
    """The samplers that last answered from each version.

    It knows a limited number of versions. Callers can name any, so beyond the limit the tenant with the most loses the
    one that it has not used for longest.
    """

    def __init__(self, max_versions: int) -> None:
        self._max_versions = max_versions
        self._versions = 0
        self._by_tenant: dict[str, OrderedDict[str, set[Upstream]]] = {}

    def of(self, key: RouteKey) -> AbstractSet[Upstream]:
        """Return the samplers that hold a version."""
        return self._find(key) or frozenset()

    def add(self, key: RouteKey, sampler: Upstream) -> None:
        """Record that a sampler holds a version."""
        tenant, version = key
        versions = self._by_tenant.setdefault(tenant, OrderedDict())
        self._versions += version not in versions
        versions.setdefault(version, set()).add(sampler)
        versions.move_to_end(version)
        if self._versions > self._max_versions:
            most = max(self._by_tenant, key=lambda other: len(self._by_tenant[other]))
            self._by_tenant[most].popitem(last=False)
            self._versions -= 1
            if not self._by_tenant[most]:
                del self._by_tenant[most]

    def discard(self, key: RouteKey, sampler: Upstream) -> None:
        """Record that a sampler does not hold a version."""
        if holders := self._find(key):
            holders.discard(sampler)

    def _find(self, key: RouteKey) -> set[Upstream] | None:
        tenant, version = key
        versions = self._by_tenant.get(tenant)
        return None if versions is None else versions.get(version)


class Upstream:
    """A service behind the gateway: its channel, readiness, and number of calls in flight."""

    def __init__(self, name: str, target: str, tls: TlsFiles | None) -> None:
        """Open the channel in the running event loop. Logs and errors use `name`: trainer or sampler."""
        self.name = name
        self.target = target
        self.in_flight = 0
        self.ready = False
        self.settled = asyncio.Event()
        """Set once the first connection attempt has succeeded or failed."""
        # What a caller does not read has to wait in the service, and not here: any other channel receives all of it.
        self._channel = open_channel(target, tls, bulk=True)
        self.unary: Callable[[str], UnaryCall] = cache(self._channel.unary_unary)
        """Returns the callable for a method with one request and one response."""
        self.response_stream: Callable[[str], ResponseStreamCall] = cache(self._channel.unary_stream)
        """Returns the callable for a method with one request and a stream of responses."""
        self.stream: Callable[[str], StreamCall] = cache(self._channel.stream_stream)
        """Returns the callable for a method of any kind."""
        self._up = asyncio.Event()
        self._created, self._was_up = monotonic(), False
        self._logged = ""
        """The event that was logged last."""
        self._watching: asyncio.Task[None] | None = None

    def connect(self) -> None:
        """Connect, and reconnect whenever the connection is lost."""
        self._watching = asyncio.create_task(self._watch())

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until the service is reachable, at most `seconds`."""
        if not self.ready:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), seconds)

    async def close(self) -> None:
        """Close the channel."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close()

    async def _watch(self) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            self.ready = state is _READY
            (self._up.set if self.ready else self._up.clear)()
            if state not in _CONNECTING:
                self.settled.set()
                # A connection that was closed for being idle is reopened at once, so this is not logged.
                self._log_change()
            await self._channel.wait_for_state_change(state)

    def _log_change(self) -> None:
        self._was_up |= self.ready
        is_late = self._was_up or monotonic() - self._created > _START_SECONDS
        event = "upstream is up" if self.ready else "upstream is down" if is_late else "waiting for upstream"
        if event != self._logged:
            self._logged = event
            log = _log.warning if event == "upstream is down" else _log.info
            log(event, upstream=self.name, target=self.target)

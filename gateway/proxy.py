"""Forward calls as bytes. Only metadata is read, never a message, so a new method needs no change here.

    caller ──► server ──► interceptors ──► Proxy ──► Router ──► Upstream ──► service

Forwarded unchanged: messages, deadline, cancellation (both ways), metadata, status code, details, trailers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from enum import Enum, auto
from functools import cache, partial
from time import monotonic
from typing import Any

import grpc
from structlog.contextvars import get_contextvars

from gateway.served_base import ServedBase, ask_base, common_base
from gateway.tenants import Tenants
from paceline import errors, tracing
from paceline.gateway.v1 import gateway_service_pb2
from paceline.log import get_logger
from paceline.metrics.v1 import metrics_service_pb2
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.channel import TlsFiles, open_channel
from paceline.rpc.identity import API_KEY_KEY, REQUEST_ID_KEY, ROUTE_KEY, current_identity
from paceline.rpc.readers import current_reader
from paceline.rpc.status import DETAILS_KEY, error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2
from paceline.trainer.v1 import trainer_service_pb2
from paceline.weights.v1 import weight_service_pb2

SERVICES = {
    service.full_name: service
    for file in (gateway_service_pb2, trainer_service_pb2, metrics_service_pb2, sampler_service_pb2, weight_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
"""Descriptors of all reachable services, by full name."""

_METHODS = {f"/{name}/{method.name}": method for name, service in SERVICES.items() for method in service.methods}
_TRAINER = ("/paceline.trainer.v1.", "/paceline.weights.v1.", "/paceline.metrics.v1.")
_SAMPLER = "/paceline.sampler.v1."
_ROUTED = frozenset(
    _SAMPLER + f"SamplerService/{name}"
    for name in ("Sample", "SampleStream", "ComputeLogprobs", "CompleteText", "LoadVersion")
)
"""The methods after which a sampler holds the version that it was asked for."""
_MAX_KEYS = 4096
_CHANGES_RUNS = frozenset(
    f"/paceline.trainer.v1.TrainerService/{name}"
    for name in ("CreateRun", "UpdateRun", "DeleteRun", "PublishWeights", "Execute", "Follow")
)
"""The methods after which a name may mean another run."""

_OWN = (API_KEY_KEY, REQUEST_ID_KEY, "user-agent", "host", "te", "content-type")
_OWN_PREFIXES = ("x-paceline-", "grpc-", ":")

_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
"""Statuses that gRPC itself gives for a service that is not there, or that stops and ends its calls."""
_READY = grpc.ChannelConnectivity.READY
_ASK_SECONDS = 5.0
"""How long a service may take to say its base model."""
_SMALL = 1 << 16
"""Bytes of a response up to which the limits on calls bound what nobody reads."""
_REFRESH_SECONDS = 30.0
"""How often a connected service is asked again."""
_RETRY_SECONDS = 1.0
"""How soon one is asked again that did not answer, or refuses all requests."""
START_SECONDS = 60.0
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

    def __init__(self, router: Router, tenants: Tenants, waiting_bytes: WaitingBytes) -> None:
        self._waiting_bytes = waiting_bytes
        self._router = router
        self._tenants = tenants

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
            response: bytes = await call
        self._unread(context)(response)
        return response

    async def _response_stream(self, method: str, request: bytes, context: Context) -> None:
        async with self._forwarded(method, lambda upstream: upstream.response_stream, request, context) as call:
            await self._pass_on(call, context)

    async def _stream(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        async with self._forwarded(method, lambda upstream: upstream.stream, requests, context) as call:
            await self._pass_on(call, context)

    async def _pass_on(self, responses: AsyncIterable[bytes], context: Context) -> None:
        write, count = current_reader().write, self._unread(context)
        async for response in responses:
            count(response)
            await write(response)

    def _unread(self, context: Context) -> Callable[[bytes], None]:
        """Return a function that counts a response as its tenant's until the next one, or until the call is over.

        A caller that reads nothing has gRPC keep the response, and the call is over only when its connection is. The
        function raises QuotaExceeded or Overloaded if too much waits to be read.
        """
        tenant, counted = current_identity().tenant, ExitStack()

        def count(response: bytes) -> None:
            counted.close()
            if len(response) > _SMALL:
                counted.enter_context(self._waiting_bytes.waiting(tenant, len(response)))

        context.add_done_callback(lambda _: counted.close())  # type: ignore[arg-type]  # its type is no protocol
        return count

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
        if tracing.is_on():
            metadata = [pair for pair in metadata if pair[0] != tracing.TRACEPARENT_KEY]
            metadata += tracing.metadata()
        metadata += self._tenants.metadata(tenant)
        if request_id := get_contextvars().get("request_id"):
            metadata.append((REQUEST_ID_KEY, request_id))
        if route is not None:
            metadata.append((ROUTE_KEY, route))
        upstream = await self._router.choose(method, key)
        with self._waiting_bytes.waiting(tenant, len(request)) if isinstance(request, bytes) else nullcontext():
            call = kind(upstream)(method)(request, timeout=context.time_remaining(), metadata=metadata)
            try:
                with self._router.counted(method, tenant), self._router.tracked(call, upstream, key):
                    yield call
                    if trailing := tuple(await call.trailing_metadata()):
                        context.set_trailing_metadata(trailing)
            except grpc.aio.AioRpcError as failure:
                if error := gateway_error(failure, upstream):
                    raise error from failure
                passed: Any = tuple(failure.trailing_metadata() or ())
                await context.abort(failure.code(), failure.details() or "", passed)


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

    The package in the method's name selects the service. A sampler gets calls only while it is reachable and serves the
    trainer's base model, by name and weights. Of these, the one with the fewest calls in flight is chosen. A sampler
    that has not served the version yet counts as having `spill_in_flight` more calls, because it would have to load the
    version; one that refuses all requests comes last. It would have the fewest calls in flight, since it fails them at
    once.
    """

    def __init__(self, trainer: Upstream, samplers: Sequence[Upstream], spill_in_flight: int) -> None:
        self.trainer = trainer
        self.samplers = samplers
        self._spill = spill_in_flight
        self._holders = Holders(_MAX_KEYS)
        self.run_changes: Counter[str] = Counter()
        """How many calls of each tenant that may change what its runs' names mean have ended."""
        self._unused: dict[Upstream, str] = {}
        """Reachable samplers of another base model, and how it differs."""
        self._changed = asyncio.Event()
        for upstream in (trainer, *samplers):
            upstream.on_change = self._note_change

    @property
    def base(self) -> ServedBase | None:
        """The base model that is served: the trainer's or, until it was reached, the one that all samplers have."""
        known = [sampler.base for sampler in self.samplers if sampler.base is not None]
        return self.trainer.base or common_base(known)

    @property
    def unused(self) -> Mapping[Upstream, str]:
        """Reachable samplers that get no calls because they serve another base model, and how it differs."""
        return self._unused

    async def choose(self, method: str, key: RouteKey | None, patience: float = 0.0) -> Upstream:
        """Return the service that handles a method.

        An unreachable service is waited for, at most `patience` seconds; one that is being connected to, a moment
        longer. Raises Unsupported for an unknown package, UpstreamUnavailable if no sampler is reachable, and
        ModelNotFound if those that are serve another base model than the trainer.
        """
        if method.startswith(_TRAINER):
            await self.trainer.wait_until_ready(patience)
            return self.trainer
        if not method.startswith(_SAMPLER):
            raise errors.Unsupported(f"no service behind the gateway has {method}")
        if not self._usable():
            await self._wait(patience)
        holders = self._holders.of(key) if key else frozenset()

        def rank(sampler: Upstream) -> tuple[bool, int]:
            is_refusing = sampler.base is None or bool(sampler.base.refusal)
            return is_refusing, sampler.in_flight + (0 if sampler in holders else self._spill)

        if usable := self._usable():
            return min(usable, key=rank)
        raise self._nobody()

    def _usable(self) -> list[Upstream]:
        return [sampler for sampler in self.samplers if sampler.ready and sampler not in self._unused]

    async def _wait(self, patience: float) -> None:
        """Wait until a sampler can be used, at most `patience` seconds, and while one is being connected to."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience or _ASK_SECONDS):
                while not self._usable() and (self._is_connecting() or (patience and self._is_any_away())):
                    self._changed.clear()
                    await self._changed.wait()

    def _is_connecting(self) -> bool:
        return any(sampler.state is State.CONNECTING for sampler in self.samplers)

    def _is_any_away(self) -> bool:
        return any(sampler.state is State.AWAY for sampler in (self.trainer, *self.samplers))

    def _nobody(self) -> errors.PacelineError:
        if not self._unused or len(self._unused) < len(self.samplers):
            return errors.UpstreamUnavailable("the sampler cannot be reached; try again")
        if self.trainer.base is None:
            return errors.UpstreamUnavailable("the trainer cannot be reached, and the samplers differ; try again")
        found = "; ".join(f"{sampler.target}: {difference}" for sampler, difference in self._unused.items())
        name = self.trainer.base.name
        return errors.ModelNotFound(f"no sampler serves {name}, the trainer's base model ({found}); start one with it")

    def _note_change(self) -> None:
        """Find out anew which samplers are unused, and log those that change."""
        before, base = self._unused, self.base
        self._unused = {}
        for sampler in self.samplers:
            if not sampler.ready or sampler.base is None:
                continue
            difference = sampler.base.difference(base) if base else "it cannot be compared until the trainer is reached"
            if difference:
                self._unused[sampler] = difference
        for sampler, difference in self._unused.items():
            if before.get(sampler) != difference:
                # Which of the samplers is wrong, if not the trainer is late, is known when the trainer is.
                log = _log.error if base else _log.info
                log("sampler gets no calls", target=sampler.target, reason=difference)
        for sampler in before.keys() - self._unused.keys():
            if sampler.ready:
                _log.info("sampler gets calls again", target=sampler.target)
        self._changed.set()

    @contextmanager
    def counted(self, method: str, tenant: str) -> Iterator[None]:
        """Count a call that ends with the block, however it ends, if it may change what names of runs mean."""
        try:
            yield
        finally:
            if method in _CHANGES_RUNS:
                self.run_changes[tenant] += 1

    @contextmanager
    def tracked(self, call: grpc.aio.Call, upstream: Upstream, key: RouteKey | None) -> Iterator[None]:
        """Count a call while the block runs, record whether its sampler served its version, then cancel the call."""
        upstream.in_flight += 1
        try:
            yield
        except (grpc.aio.AioRpcError, errors.Unavailable) as failure:
            is_away = not isinstance(failure, grpc.aio.AioRpcError) or failure.code() in _AWAY
            if is_away:
                upstream.ask_again()
                if key:
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


class State(Enum):
    """How far the gateway is with a service."""

    CONNECTING = auto()
    """It is being connected to, or asked for its base model."""
    READY = auto()
    AWAY = auto()
    """The last try to connect has failed."""


class Upstream:
    """A service behind the gateway: its channel, state, base model, and number of calls in flight."""

    def __init__(self, name: str, target: str, tls: TlsFiles | None, credential: str = "") -> None:
        """Open the channel in the running event loop. Logs and errors use `name`: trainer or sampler."""
        self.name = name
        self.target = target
        self.in_flight = 0
        self.state = State.CONNECTING
        self.base: ServedBase | None = None
        """What it said when it was asked last, at the latest after each time that it was connected to.

        None if it does not say. What a trainer said holds until it says something else, what a sampler said until its
        connection is lost.
        """
        self.on_change: Callable[[], object] = lambda: None
        """Called when state or base model change."""
        self._credential = credential
        self.settled = asyncio.Event()
        """Set once the first connection attempt has succeeded, and the service has said its base model, or failed."""
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
        self._connected = False
        self._connections = 0
        """Changes of the connection so far, by which an answer is known to be of this one."""
        self._to_ask = asyncio.Event()
        self._tasks: Sequence[asyncio.Task[None]] = ()

    @property
    def ready(self) -> bool:
        """Whether it is connected and has been asked for its base model."""
        return self.state is State.READY

    def connect(self) -> None:
        """Connect, and reconnect whenever the connection is lost."""
        self._tasks = asyncio.create_task(self._watch()), asyncio.create_task(self._keep_asking())

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until the service is reachable, at most `seconds`."""
        if not self.ready:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), seconds)

    def ask_again(self) -> None:
        """Ask the service now whether it refuses requests, unless it does anyway: a call found it unavailable."""
        if self.ready and not self._is_refusing():
            self._to_ask.set()

    async def close(self) -> None:
        """Close the channel."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _watch(self) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is _READY:
                self._connected = True
                self._to_ask.set()
            else:
                self._set(State.CONNECTING if state in _CONNECTING else State.AWAY, self._lasting_base())
            if state not in _CONNECTING:
                # A connection that was closed for being idle is reopened at once, so this is not logged.
                self._log_change(is_up=state is _READY)
            if state not in {_READY, *_CONNECTING}:
                self.settled.set()
            await self._channel.wait_for_state_change(state)
            self._connections += 1
            if self._connected:
                self._connected = False
                # Whoever is there next has to say anew what it serves.
                self._set(State.CONNECTING, self._lasting_base())

    async def _keep_asking(self) -> None:
        seconds = _RETRY_SECONDS
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._to_ask.wait(), seconds)
            self._to_ask.clear()
            if self._connected:
                is_settled = await self._ask() and not self._is_refusing()
                seconds = _REFRESH_SECONDS if is_settled else _RETRY_SECONDS

    async def _ask(self) -> bool:
        """Ask the connected service for its base model; return whether it answered."""
        connection, base, answered = self._connections, self._lasting_base(), True
        try:
            base = await ask_base(self._channel, self.name, self._credential, _ASK_SECONDS)
        except grpc.aio.AioRpcError as failure:
            answered = False
            if failure.code() in _AWAY or failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return False  # it stays what it was: being connected to, if it has not answered since
            # It is ready: its calls are answered with its own error, such as that of a wrong credential.
        if connection == self._connections:
            self._set(State.READY, base)
            self.settled.set()
        return answered

    def _is_refusing(self) -> bool:
        return self.base is not None and bool(self.base.refusal)

    def _lasting_base(self) -> ServedBase | None:
        return self.base if self.name == "trainer" else None

    def _set(self, state: State, base: ServedBase | None) -> None:
        changes = (state, base) != (self.state, self.base)
        self.state, self.base = state, base
        (self._up.set if self.ready else self._up.clear)()
        if changes:
            self.on_change()

    def _log_change(self, *, is_up: bool) -> None:
        self._was_up |= is_up
        is_late = self._was_up or monotonic() - self._created > START_SECONDS
        event = "upstream is up" if is_up else "upstream is down" if is_late else "waiting for upstream"
        if event != self._logged:
            self._logged = event
            log = _log.warning if event == "upstream is down" else _log.info
            log(event, upstream=self.name, target=self.target)

"""Admit calls: identify the caller, check that the method is open to tenants, wait for its turn."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import time
from types import MappingProxyType
from typing import Protocol

from structlog.contextvars import bind_contextvars

from paceline import errors, tracing
from paceline.extras import needing
from paceline.files.secret_files import read_pem
from paceline.requests.tenant_limits import TenantLimits
from paceline.rpc.identity import API_KEY_KEY, DEFAULT_TENANT, Identity, is_tenant, set_identity
from paceline.rpc.interceptors import AroundInterceptor, Call
from paceline.rpc.server import REFLECTION_METHODS


class Access(Enum):
    """Who may call a method."""

    TENANT = auto()
    """Every caller that the gateway can identify."""
    NOBODY = auto()
    """Only services, which call each other directly, not through the gateway."""


_TRAINER = (
    "GetServerInfo",
    "GetUsage",
    "GetTokenizer",
    "RenderConversations",
    "CreateRun",
    "GetRun",
    "UpdateRun",
    "AttachRun",
    "ListRuns",
    "DeleteRun",
    "Execute",
    "Follow",
    "ForwardBackward",
    "OptimStep",
    "SaveCheckpoint",
    "LoadCheckpoint",
    "ListCheckpoints",
    "DeleteCheckpoint",
    "SetCheckpointTtl",
    "DownloadCheckpoint",
    "UploadCheckpoint",
    "PublishWeights",
)
_METRICS = ("LogMetrics", "GetMetrics", "WatchMetrics", "GetRollouts")
_SAMPLER = (
    "GetServerInfo",
    "GetUsage",
    "Sample",
    "SampleStream",
    "ComputeLogprobs",
    "CompleteText",
    "LoadVersion",
    "UnloadVersion",
    "ListVersions",
)

ACCESS: Mapping[str, Access] = MappingProxyType(
    {
        **{f"/paceline.trainer.v1.TrainerService/{name}": Access.TENANT for name in _TRAINER},
        **{f"/paceline.metrics.v1.MetricsService/{name}": Access.TENANT for name in _METRICS},
        **{f"/paceline.sampler.v1.SamplerService/{name}": Access.TENANT for name in _SAMPLER},
        "/paceline.sampler.v1.SamplerService/UpdateWeights": Access.NOBODY,
        "/paceline.weights.v1.WeightService/FetchVersion": Access.TENANT,
        "/paceline.weights.v1.WeightService/WatchVersions": Access.NOBODY,
        "/paceline.gateway.v1.GatewayService/GetCapabilities": Access.TENANT,
        "/paceline.gateway.v1.GatewayService/WhoAmI": Access.TENANT,
        **dict.fromkeys(REFLECTION_METHODS, Access.TENANT),
    }
)
"""Maps /package.Service/Method to its access. A method that is not listed is refused: a new one stays closed."""


_CHECK_SECONDS = 2.0
"""How often a call in progress is checked for whether its credential would still be admitted."""


class Authenticator(Protocol):
    """Identifies callers by their token."""

    def identify(self, token: str) -> Identity | None:
        """Return the identity of a token's holder, or None if unknown. The token is empty if the caller sent none.

        Raises ApiKeyExpired.
        """
        ...

    def still_admits(self, identity: Identity) -> bool:
        """Return whether the credential that `identify` found for this identity would be admitted now."""
        ...


class AnonymousAuthenticator:
    """Admits every caller as the default tenant, for a gateway that runs with --insecure."""

    def identify(self, token: str) -> Identity | None:
        return Identity(DEFAULT_TENANT)

    def still_admits(self, identity: Identity) -> bool:
        return identity.tenant == DEFAULT_TENANT and not identity.credential


class JwtVerifier:
    """Identifies callers by JSON Web Tokens (RFC 7519), signed with one key and algorithm. They must expire (`exp`)."""

    def __init__(self, public_key_file: Path, algorithm: str, tenant_claim: str, audience: str = "") -> None:
        """Read the key. Raises InvalidArgument if it is none for the algorithm, MissingExtra without PyJWT."""
        with needing("jwt", "jwt_public_key_file"):
            import jwt  # noqa: PLC0415
        self._jwt = jwt
        try:
            self._public_key = jwt.get_algorithm_by_name(algorithm).prepare_key(read_pem(public_key_file))
        except (ValueError, jwt.InvalidKeyError) as error:
            message = f"{public_key_file} holds no public key for {algorithm} in PEM"
            raise errors.InvalidArgument(message, field="jwt_public_key_file") from error
        self._algorithm = algorithm
        self._tenant_claim = tenant_claim
        self._audience = audience or None
        self._id = sha256(f"{self._public_key}\0{algorithm}\0{tenant_claim}\0{audience}".encode()).hexdigest()[:32]
        """Tells tokens of this key from those of others."""

    def identify(self, token: str) -> Identity | None:
        try:
            claims = self._jwt.decode(
                token,
                self._public_key,
                algorithms=[self._algorithm],
                audience=self._audience,
                options={"require": ["exp", self._tenant_claim]},
            )
        except self._jwt.InvalidTokenError:
            return None
        tenant, credential = claims[self._tenant_claim], f"{self._id}:{int(claims['exp'])}"
        return Identity(tenant, str(claims.get("sub", "jwt")), credential) if is_tenant(tenant) else None

    def still_admits(self, identity: Identity) -> bool:
        """Return whether the token was signed with this key and has not expired: at the time that its issuer set."""
        key, _, expires = identity.credential.partition(":")
        return key == self._id and expires.isdecimal() and time() < int(expires)


def bearer_token(authorization: str) -> str:
    """Return the token of a header `Bearer <token>`; empty if it is not of that form."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class FairQueue:
    """Limits the calls in flight, in total and per tenant, with a bounded queue per tenant.

    Waiting calls are admitted in FIFO order within a tenant, and tenants take turns.
    """

    def __init__(
        self,
        max_in_flight: int,
        max_in_flight_per_tenant: int,
        max_queued_per_tenant: int,
        tenants: TenantLimits | None = None,
    ) -> None:
        """Set the limits; `tenants` may have one on calls in flight of their own."""
        self._tenants = TenantLimits() if tenants is None else tenants
        self._max_in_flight = max_in_flight
        self._max_per_tenant = max_in_flight_per_tenant
        self._max_queued = max_queued_per_tenant
        self._in_flight = 0
        self._by_tenant: Counter[str] = Counter()
        # Tenants in order of their turns, the most recently served last; each queue in order of arrival.
        self._waiting: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

    async def acquire(self, tenant: str) -> None:
        """Wait for a place. Raises Overloaded at once when the tenant's queue is full."""
        if tenant not in self._waiting and self._has_place(tenant):
            self._take(tenant)
            return
        waiting = len(self._waiting.get(tenant, ()))
        if waiting >= self._max_queued:
            raise errors.Overloaded(f"{waiting} calls of this tenant are already waiting; send fewer at the same time")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self._give_up(tenant, turn)
            raise

    def release(self, tenant: str) -> None:
        """Release a place."""
        self._in_flight -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        while (following := next(filter(self._has_place, self._waiting), None)) is not None:
            queue = self._waiting.pop(following)
            turn, _ = queue.popitem(last=False)
            if queue:
                self._waiting[following] = queue
            # A call cancelled in this iteration of the event loop is still in the queue.
            if not turn.cancelled():
                self._take(following)
                turn.set_result(None)

    def limit_of(self, tenant: str) -> int:
        """Return the most calls of a tenant in flight; 0 means that only the limit in total applies."""
        return self._tenants.of(tenant, "calls", self._max_per_tenant)

    def by_tenant(self) -> dict[str, tuple[int, int]]:
        """Return how many calls of each tenant are in flight, and how many wait. Thread-safe."""
        waiting = {tenant: len(queue) for tenant, queue in list(self._waiting.items())}
        in_flight = dict(self._by_tenant)
        return {tenant: (in_flight.get(tenant, 0), waiting.get(tenant, 0)) for tenant in {*waiting, *in_flight}}

    def _has_place(self, tenant: str) -> bool:
        limit = self.limit_of(tenant)
        return self._in_flight < self._max_in_flight and (not limit or self._by_tenant[tenant] < limit)

    def _take(self, tenant: str) -> None:
        self._in_flight += 1
        self._by_tenant[tenant] += 1

    def _give_up(self, tenant: str, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():
            self.release(tenant)
            return
        if queue := self._waiting.get(tenant):
            queue.pop(turn, None)
        if not queue:
            self._waiting.pop(tenant, None)


class AdmissionInterceptor(AroundInterceptor):
    """Admits a call when a place is free and sets its identity; ends it when its credential holds no longer.

    Raises InvalidApiKey, ApiKeyExpired, MethodNotAllowed, Overloaded.
    """

    def __init__(self, authenticators: Sequence[Authenticator], queue: FairQueue) -> None:
        self._authenticators = authenticators
        self._queue = queue

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        token = bearer_token(call.metadata.get(API_KEY_KEY, ""))
        for authenticator in self._authenticators:
            if identity := authenticator.identify(token):
                break
        else:
            problem = "is not known" if token else "is missing"
            raise errors.InvalidApiKey(f"the API key {problem}; send metadata `authorization: Bearer <key>`")
        if ACCESS.get(call.method, Access.NOBODY) is not Access.TENANT:
            raise errors.MethodNotAllowed(f"{call.method} is not open to callers of the gateway")
        set_identity(identity)
        # Each call runs in its own context, so nothing needs to be unbound.
        bind_contextvars(tenant=identity.tenant, key=identity.key_name)
        async with while_admitted(partial(authenticator.still_admits, identity)):
            with tracing.span("queue"):
                await self._queue.acquire(identity.tenant)
            try:
                yield
            finally:
                self._queue.release(identity.tenant)


@asynccontextmanager
async def while_admitted(is_admitted: Callable[[], bool]) -> AsyncIterator[None]:
    """End the block with InvalidApiKey within seconds after `is_admitted` returns False.

    Watches last for days: one of a key that was removed, or has expired, must not go on as long.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    try:
        async with asyncio.timeout(None) as limit:

            def check() -> None:
                nonlocal timer
                if is_admitted():
                    timer = loop.call_later(_CHECK_SECONDS, check)
                else:
                    limit.reschedule(loop.time())

            timer = loop.call_later(_CHECK_SECONDS, check)
            try:
                yield
            finally:
                timer.cancel()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise errors.InvalidApiKey("the API key was removed or has expired; the call was ended") from error

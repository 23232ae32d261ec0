"""Calls to the services for HTTP callers, with the same queue, byte limits and routes as over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import grpc
from google.protobuf.message import Message
from structlog.contextvars import get_contextvars

from gateway.admission import FairQueue
from gateway.proxy import SERVICES, Router, Upstream, gateway_error
from gateway.tenants import Tenants
from paceline import codec, errors, tracing
from paceline.codec.commands import execute_request, may_have_arrived, reply_in
from paceline.errors import Fate
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import REQUEST_ID_KEY, ROUTE_KEY
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import CommandState, ModelRef, SampleResult, SamplingParams
from paceline.types.training import Array

Reply = TypeVar("Reply", bound=Message)

_PAUSE_SECONDS = 1.0
"""Before a command is followed again."""
_PATIENCE_SECONDS = 5.0
"""How long to wait for an unreachable service."""

_PATHS = {
    method.input_type.full_name: f"/{name}/{method.name}"
    for name, service in SERVICES.items()
    for method in service.methods
}
"""Maps the full name of a request message to its method."""


@dataclass(frozen=True, slots=True)
class Services:
    """The trainer and the samplers, called within the queue and the limits of the gateway's gRPC calls."""

    router: Router
    tenants: Tenants
    queue: FairQueue
    waiting_bytes: WaitingBytes

    async def call(
        self, tenant: str, request: Message, reply: type[Reply], *, model: ModelRef | None = None, seconds: float = 30.0
    ) -> Reply:
        """Call the method of this request for a tenant. Raises the service's error.

        `model` is the model that a sampling call names.
        """
        async with self._calling(tenant, request, model, seconds, lambda upstream: upstream.unary) as (call, _):
            return reply.FromString(await call)

    async def execute(
        self, tenant: str, command: Any, *, seconds: float = 600.0, accepted: Callable[[], object] | None = None
    ) -> Any:
        """Send a command, with its run_id, seq_id and attachment, and follow it until it has ended; return its reply.

        With `accepted`, which is called once the command is durable and need not be sent again, it is followed from
        then on as long as it takes; otherwise `seconds` bounds each call. Raises what the trainer answers, or the error
        of a call; its `fate` says what became of the command.
        """
        run_id, seq_id = command.run_id, command.seq_id
        execute = execute_request(command, run_id, seq_id, command.attachment)
        del command
        is_accepted = False

        def hear(status: trainer_pb.CommandStatus) -> CommandState:
            nonlocal is_accepted
            state = CommandState(status.state)
            if accepted is not None and not is_accepted and state.is_durable:
                is_accepted = True
                accepted()
            return state

        try:
            async with self.stream(tenant, execute, trainer_pb.ExecuteResponse, seconds=seconds) as first:
                del execute
                status = (await _next(first)).status
        except errors.PacelineError as error:
            error.fate = Fate.UNKNOWN if may_have_arrived(error) else Fate.TURNED_AWAY
            raise
        follow = trainer_pb.FollowRequest(run_id=run_id, seq_ids=[seq_id])
        while not hear(status).has_ended:
            try:
                async with self.stream(tenant, follow, trainer_pb.FollowResponse, seconds=seconds) as changes:
                    async for change in changes:
                        hear(status := change.status)
            except errors.PacelineError as error:
                if is_accepted and may_have_arrived(error):
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                error.fate = Fate.UNKNOWN
                raise
        return reply_in(status)

    async def sample(
        self, tenant: str, model: ModelRef, tokens: Array, params: SamplingParams, *, seconds: float, **options: Any
    ) -> SampleResult:
        """Sample completions of a prompt; `options` are other fields of SampleRequest.

        Raises OutOfRange for a number that its field cannot hold.
        """
        request = codec.make(
            pb.SampleRequest,
            model=codec.model_ref_to_proto(model),
            prompt=codec.tensor_to_proto(tokens),
            params=codec.sampling_params_to_proto(params),
            **options,
        )
        return codec.sample_result_from_proto(
            await self.call(tenant, request, pb.SampleResponse, model=model, seconds=seconds)
        )

    @asynccontextmanager
    async def stream(
        self,
        tenant: str,
        request: Message,
        reply: type[Reply],
        *,
        model: ModelRef | None = None,
        seconds: float = 600.0,
    ) -> AsyncIterator[AsyncIterator[Reply]]:
        """Call a method that answers with a stream, which ends with the block. See `call`."""
        calling = self._calling(tenant, request, model, seconds, lambda upstream: upstream.response_stream)
        async with calling as (call, upstream):

            async def replies() -> AsyncIterator[Reply]:
                with _converted(upstream):
                    async for message in call:
                        yield reply.FromString(message)

            yield replies()

    @asynccontextmanager
    async def _calling(
        self,
        tenant: str,
        request: Message,
        model: ModelRef | None,
        seconds: float,
        kind: Callable[[Upstream], Callable[[str], Callable[..., Any]]],
    ) -> AsyncIterator[tuple[Any, Upstream]]:
        """Yield the call of a request's method and its service. Waits for a place, and for an unreachable service.

        HTTP clients do not retry as Paceline's own client does.
        """
        body, method = request.SerializeToString(), _PATHS[request.DESCRIPTOR.full_name]
        key = None if model is None or model.is_base else (tenant, str(model))
        metadata = [*self.tenants.metadata(tenant), *tracing.metadata()]
        metadata.append((REQUEST_ID_KEY, get_contextvars().get("request_id") or uuid4().hex))
        if key is not None:
            metadata.append((ROUTE_KEY, key[1]))
        with tracing.span("queue"):
            await self.queue.acquire(tenant)
        try:
            with self.waiting_bytes.waiting(tenant, len(body)):
                upstream = await self.router.choose(method, key, _PATIENCE_SECONDS)
                call = kind(upstream)(method)(body, timeout=seconds, metadata=metadata)
                with (
                    self.router.counted(method, tenant),
                    self.router.tracked(call, upstream, key),
                    _converted(upstream),
                ):
                    yield call, upstream
        finally:
            self.queue.release(tenant)


def is_unread(error: errors.PacelineError) -> bool:
    """Return whether a command was turned away for its message, which no repetition would change."""
    is_at_fault = isinstance(error, errors.InvalidArgument | errors.MessageTooLarge)
    return is_at_fault and error.fate is Fate.TURNED_AWAY


async def _next(messages: AsyncIterator[Reply]) -> Reply:
    async for message in messages:
        return message
    raise errors.Internal("a stream of statuses ended without one")


@contextmanager
def _converted(upstream: Upstream) -> Iterator[None]:
    """Convert a service's failure to a PacelineError."""
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise gateway_error(failure, upstream) or error_from_rpc(failure) from failure

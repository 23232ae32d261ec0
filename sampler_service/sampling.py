"""Serves sampling requests: validates and admits them, leases their weights, and runs them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from uuid import uuid4

from paceline import errors
from paceline.types import ModelRef, SampleResult, ServedModel, StreamedTokens
from paceline.types.training import Array
from sampler_service.engine.protocol import (
    Adapter,
    Delivery,
    GenerationRequest,
    SamplerEngine,
    TextEndpoint,
    TextRequest,
    TokenDelta,
)
from sampler_service.metrics import SamplerMetrics
from sampler_service.requests.reply import check_numbers, collect, complete, repeated
from sampler_service.requests.request import SampleRequest
from sampler_service.requests.text_fields import read_body
from sampler_service.requests.validation import RequestLimits, check_amounts, check_ref, check_sample, check_tokens
from sampler_service.scheduling.admission import Admission, Demand
from sampler_service.scheduling.tenant_queue import TenantQueue
from sampler_service.stores.base import Versions
from sampler_service.stores.leases import Lease

Generation = tuple[Lease, AsyncIterator[TokenDelta]]


class Sampler:
    """Serves requests with one engine and its versions."""

    def __init__(
        self,
        engine: SamplerEngine,
        registry: Versions,
        limits: RequestLimits,
        admission: Admission,
        queue: TenantQueue,
        metrics: SamplerMetrics,
        check_standing: Callable[[ModelRef, str], None],
    ) -> None:
        """`check_standing` raises if the weights' results disagree with the trainer's."""
        self._engine = engine
        self._registry = registry
        self._limits = limits
        self._admission = admission
        self._queue = queue
        self._metrics = metrics
        self._check_standing = check_standing

    async def sample(self, request: SampleRequest, tenant: str) -> SampleResult:
        """Return all completions when they have ended. Cancelling frees them."""
        async with self._generation(request, tenant, Delivery(eager=False)) as (lease, deltas):
            result = await collect(deltas, request.num_samples, lease.served, prompt_logprobs=request.prompt_logprobs)
            if request.prompt_logprobs or request.topk_prompt_logprobs:
                _check_current(lease)
            return result

    async def stream(
        self, request: SampleRequest, tenant: str, give_up: Callable[[str], None]
    ) -> AsyncGenerator[StreamedTokens]:
        """Yield tokens as they are sampled. An error is raised only after the tokens that preceded it.

        Closing the iterator early frees the completions. `give_up` is called with the reason if too many tokens wait
        for the reader; it must close this iterator.
        """
        most = self._limits.max_unread_tokens
        overflowed = partial(give_up, f"more than {most} tokens were left unread")
        async with self._generation(request, tenant, Delivery(max_unread=most, overflowed=overflowed)) as (
            lease,
            deltas,
        ):
            served = lease.served
            async for delta in deltas:
                spans = delta.version_spans
                yield StreamedTokens(delta.index, delta.tokens, delta.logprobs, delta.stop_reason, served, spans)

    async def compute_logprobs(self, ref: ModelRef, tokens: Array, tenant: str) -> tuple[Array, ServedModel]:
        """Return the log-probability of each of N >= 2 tokens given the previous ones: float32, shape [N], NaN at 0."""
        check_ref(ref, self._limits.model)
        check_tokens(tokens, "tokens", self._limits.model)
        if len(tokens) < 2:
            raise errors.InvalidShape("has 1 token; send at least 2", field="tokens")
        self._check_standing(ref, tenant)
        with self._admission.admit(tenant, Demand(1, len(tokens)), self._engine.num_running()):
            async with self._registry.lease(ref, tenant) as lease, self._queue.places(tenant, 1):
                logprobs = await self._engine.compute_logprobs(tokens.tolist(), lease.adapter, tenant)
                _check_current(lease)
                check_numbers(logprobs[1:].tolist(), lease.served)
                return logprobs, lease.served

    async def complete_text(
        self, ref: ModelRef, endpoint: TextEndpoint, content: bytes, tenant: str
    ) -> AsyncGenerator[tuple[ServedModel, bytes]]:
        """Yield the response to a call of OpenAI's API, whole or event by event, with the model that it comes from."""
        check_ref(ref, self._limits.model)
        body = read_body(content, endpoint, self._limits.model.max_context_length)
        self._check_standing(ref, tenant)
        async with self._registry.lease(ref, tenant) as lease:

            @asynccontextmanager
            async def place(prompt: int, completions: int, each: int) -> AsyncIterator[None]:
                check_amounts(completions, self._limits)
                demand = Demand(completions, prompt + completions * each)
                with self._admission.admit(tenant, demand, self._engine.num_running()):
                    async with self._queue.places(tenant, completions):
                        yield

            def see(logprobs: Iterable[float]) -> None:
                seen = list(logprobs)
                self._metrics.tokens.inc(len(seen))
                check_numbers(seen, lease.served)

            request = TextRequest(endpoint, body, lease.adapter, tenant, place, see)
            async with aclosing(self._engine.complete_text(request)) as parts:
                async for part in parts:
                    yield lease.served, part

    @asynccontextmanager
    async def _generation(self, request: SampleRequest, tenant: str, delivery: Delivery) -> AsyncIterator[Generation]:
        check_sample(request, self._limits)
        self._check_standing(request.ref, tenant)
        computed = _num_computed(request)
        with self._admission.admit(tenant, self._demand(request, computed), self._engine.num_running()):
            async with (
                self._registry.lease(request.ref, tenant) as lease,
                self._queue.places(tenant, computed) as places,
            ):

                def ended() -> None:
                    lease.release()
                    places.end()

                def see(delta: TokenDelta) -> None:
                    self._metrics.tokens.inc(len(delta.tokens))
                    check_numbers(delta.logprobs, lease.served)
                    if delta.prompt_logprobs is not None:
                        check_numbers(delta.prompt_logprobs[1:].tolist(), lease.served)

                # Release the lease and the places when the engine has finished, not when the reader has every token:
                # a slow reader must not block other requests.
                delivery = replace(delivery, completed=places.ended, ended=ended)
                generation = _generation_request(request, computed, lease.adapter, tenant, delivery)
                deltas = self._engine.generate(generation)
                completed = complete(deltas, computed, see)
                async with aclosing(repeated(completed, request.num_samples // computed)) as samples:
                    yield lease, samples

    def _demand(self, request: SampleRequest, computed: int) -> Demand:
        prompt = len(request.prompt)
        each = request.params.max_tokens or self._limits.model.max_context_length - prompt
        return Demand(computed, prompt + computed * each)


def _num_computed(request: SampleRequest) -> int:
    """Return how many completions to compute: one if sampling is greedy, because all samples would be the same."""
    return request.num_samples if request.params.temperature > 0 else 1


def _check_current(lease: Lease) -> None:
    """Check that a sequence was scored by a single version. Raises EngineUnavailable."""
    if not lease.is_current():
        raise errors.EngineUnavailable("the weights changed meanwhile; try again")


def _generation_request(
    request: SampleRequest, num_samples: int, adapter: Adapter | None, tenant: str, delivery: Delivery
) -> GenerationRequest:
    return GenerationRequest(
        request_id=uuid4().hex,
        prompt=request.prompt.tolist(),
        params=request.params,
        num_samples=num_samples,
        adapter=adapter,
        tenant=tenant,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_logprobs=request.topk_logprobs,
        delivery=delivery,
    )

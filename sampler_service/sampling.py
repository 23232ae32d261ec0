"""Serves sampling requests: validates and admits them, leases their weights, and runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from math import isnan
from time import perf_counter
from typing import cast
from uuid import uuid4

import numpy as np

from paceline import errors, tracing
from paceline.requests.bodies import decoded
from paceline.types import ModelRef, Quota, SampledSequence, SampleResult, ServedModel, StopReason, StreamedTokens
from paceline.types.training import Array
from sampler_service.engine.coalescer import concatenated
from sampler_service.engine.protocol import (
    Delivery,
    GenerationRequest,
    SamplerEngine,
    TextEndpoint,
    TextRequest,
    TokenDelta,
)
from sampler_service.metrics import SamplerMetrics
from sampler_service.openai_sampling import named_as_sent
from sampler_service.scheduling.admission import Admission, Usage
from sampler_service.scheduling.tenant_queue import TakenPlaces, TenantQueue
from sampler_service.stages import GenerationStages
from sampler_service.stores.base import Lease, Versions
from sampler_service.validation import (
    RequestLimits,
    SampleRequest,
    check_ref,
    check_sample,
    check_tokens,
    read_body,
)

_CONSTRAINING = frozenset({"response_format", "structured_outputs", "tools"})
"""Fields of OpenAI's API that constrain what is sampled."""

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
        check_agreement: Callable[[ModelRef, str], None],
        max_versions: Callable[[str], int],
    ) -> None:
        """`check_agreement` raises if the weights' results disagree with the trainer's.

        `max_versions` returns how many versions a tenant may have loaded if it is the only one.
        """
        self._engine = engine
        self._registry = registry
        self._limits = limits
        self._admission = admission
        self._queue = queue
        self._checks = TenantQueue(1)
        """For constraints that are not known: one is checked at a time."""
        self._metrics = metrics
        self._check_agreement = check_agreement
        self._max_versions = max_versions

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
        self._check_agreement(ref, tenant)
        with self._admission.admit(tenant, Usage(1, len(tokens)), self._engine.num_running()):
            async with self._registry.lease(ref, tenant) as lease, self._places(tenant, 1) as places:
                logprobs = await self._engine.compute_logprobs(tokens.tolist(), lease.adapter, tenant, places.priority)
                _check_current(lease)
                _check_numbers(logprobs[1:].tolist(), lease.served)
                return logprobs, lease.served

    async def complete_text(
        self, ref: ModelRef, endpoint: TextEndpoint, content: bytes, tenant: str
    ) -> AsyncGenerator[tuple[ServedModel, bytes]]:
        """Yield the response to a call of OpenAI's API, whole or event by event, with the model that it comes from."""
        check_ref(ref, self._limits.model)
        body = await decoded(len(content), read_body, content, endpoint, self._limits)
        self._check_agreement(ref, tenant)
        async with self._registry.lease(ref, tenant) as lease:

            @asynccontextmanager
            async def place(prompt: int, completions: int, each: int) -> AsyncIterator[int]:
                usage = Usage(completions, prompt + completions * each)
                with self._admission.admit(tenant, usage, self._engine.num_running()):
                    async with self._places(tenant, completions) as places:
                        start = perf_counter()
                        yield places.priority
                        tracing.record("generate", start, perf_counter(), completions=completions)

            def see(logprobs: Iterable[float]) -> None:
                seen = list(logprobs)
                self._metrics.tokens.inc(len(seen))
                _check_numbers(seen, lease.served, is_constrained=not _CONSTRAINING.isdisjoint(body.fields))

            def scored(logprobs: Iterable[float]) -> None:
                _check_current(lease)
                _check_numbers(logprobs, lease.served)

            turn = partial(self._checks.places, tenant, 1)
            request = TextRequest(
                endpoint, body.fields, body.sampling, lease.adapter, tenant, place, see, scored, lease.release, turn
            )
            with named_as_sent(body.sent):
                async with aclosing(self._engine.complete_text(request)) as parts:
                    async for part in parts:
                        yield lease.served, part

    def quotas(self, tenant: str) -> Sequence[Quota]:
        """Return a tenant's quotas. They are enforced where usage is counted."""
        return (*self._admission.used(tenant), Quota("versions", self._loaded()[tenant], self._max_versions(tenant)))

    def tenants(self) -> list[str]:
        """Return the tenants that use anything; names may repeat."""
        return [*self._admission.tenants(), *self._loaded()]

    def _loaded(self) -> Counter[str]:
        return Counter(entry.tenant for entry in self._registry)

    @asynccontextmanager
    async def _places(self, tenant: str, completions: int) -> AsyncIterator[TakenPlaces]:
        """Wait for a turn in the engine, and hold its places."""
        start = perf_counter()
        async with self._queue.places(tenant, completions) as places:
            now = perf_counter()
            self._metrics.queued(tenant, now - start)
            tracing.record("queue", start, now, completions=completions)
            yield places

    @asynccontextmanager
    async def _generation(self, request: SampleRequest, tenant: str, delivery: Delivery) -> AsyncIterator[Generation]:
        check_sample(request, self._limits)
        self._check_agreement(request.ref, tenant)
        # If sampling is greedy, all samples are the same: one is computed.
        computed, prompt = request.num_samples if request.params.temperature > 0 else 1, len(request.prompt)
        each = request.params.max_tokens or self._limits.model.max_context_length - prompt
        usage = Usage(computed, prompt + computed * each)
        with self._admission.admit(tenant, usage, self._engine.num_running()):
            await self._engine.check_constraint(request.params, partial(self._checks.places, tenant, 1))
            start = perf_counter()
            async with self._registry.lease(request.ref, tenant) as lease, self._places(tenant, computed) as places:
                if lease.load_milliseconds:
                    tracing.record("weights", start, start + lease.load_milliseconds / 1e3)

                stages = GenerationStages(prompt)

                def ended() -> None:
                    lease.release()
                    places.end()
                    stages.end()

                is_constrained = bool(request.params.json_schema or request.params.regex)

                def see(delta: TokenDelta) -> None:
                    self._metrics.tokens.inc(len(delta.tokens))
                    _check_numbers(delta.logprobs, lease.served, is_constrained=is_constrained)
                    if delta.prompt_logprobs is not None:
                        _check_numbers(delta.prompt_logprobs[1:].tolist(), lease.served)

                generation = GenerationRequest(
                    request_id=uuid4().hex,
                    prompt=request.prompt.tolist(),
                    params=request.params,
                    num_samples=computed,
                    adapter=lease.adapter,
                    tenant=tenant,
                    prompt_logprobs=request.prompt_logprobs,
                    topk_prompt_logprobs=request.topk_prompt_logprobs,
                    topk_logprobs=request.topk_logprobs,
                    # Release the lease and the places when the engine has finished, not when the reader has every
                    # token: a slow reader must not block other requests.
                    delivery=replace(delivery, sampled=stages.listener, completed=places.ended, ended=ended),
                    priority=places.priority,
                )
                completed = complete(self._engine.generate(generation), computed, see)
                async with aclosing(_repeated(completed, request.num_samples // computed)) as samples:
                    yield lease, samples


def _check_current(lease: Lease) -> None:
    """Check that a sequence was scored by a single version. Raises EngineUnavailable."""
    if not lease.is_current():
        raise errors.EngineUnavailable("the weights changed meanwhile; try again")


async def complete(
    deltas: AsyncIterator[TokenDelta], num_samples: int, see: Callable[[TokenDelta], None]
) -> AsyncGenerator[TokenDelta]:
    """Yield the engine's deltas, and close the engine's iterator at the end in any case.

    A completion that the engine left without a stop reason ends as ABORTED. `see` is called with each delta before it
    is yielded, and raises if it must not be passed on.
    """
    unfinished = set(range(num_samples))
    async with aclosing(cast("AsyncGenerator[TokenDelta]", deltas)) as source:
        async for delta in source:
            see(delta)
            if delta.stop_reason is not None:
                unfinished.discard(delta.index)
            yield delta
    for index in sorted(unfinished):
        yield TokenDelta(index, [], [], StopReason.ABORTED)


def _check_numbers(logprobs: Iterable[float], model: ServedModel, *, is_constrained: bool = False) -> None:
    """Check that the tokens were not sampled from NaN. Raises NonFinite."""
    if isnan(sum(logprobs)):
        version = f"version {model.version} of {model.run_id}" if model.version else ""
        weights = model.checkpoint or version or model.base_model
        cause = (
            "its weights are so large that the computation overflows; continue from an earlier checkpoint, with a "
            "lower learning rate"
        )
        if is_constrained:
            cause = f"the constraint allows no token; if it does allow one, {cause}"
        raise errors.NonFinite(f"{weights} gives NaN here: {cause}", field="model")


async def _repeated(deltas: AsyncGenerator[TokenDelta], copies: int) -> AsyncGenerator[TokenDelta]:
    """Yield the deltas; with several copies there is only one completion, and each delta is repeated for every copy."""
    async with aclosing(deltas) as source:
        async for delta in source:
            yield delta
            for index in range(1, copies):
                yield replace(delta, index=index)


async def collect(
    deltas: AsyncIterator[TokenDelta], num_samples: int, model: ServedModel, *, prompt_logprobs: bool
) -> SampleResult:
    """Collect the completions of one prompt; `prompt_logprobs` says whether the prompt's were requested."""
    parts: list[list[TokenDelta]] = [[] for _ in range(num_samples)]
    first: TokenDelta | None = None
    cached = 0
    async for delta in deltas:
        parts[delta.index].append(delta)
        first = first or delta
        cached = max(cached, delta.prompt_cache_hit_tokens)
    return SampleResult(
        sequences=[_sequence(part) for part in parts],
        model=model,
        prompt_logprobs=first.prompt_logprobs if first and prompt_logprobs else None,
        topk_prompt_logprobs=first.topk_prompt_logprobs if first else None,
        prompt_cache_hit_tokens=cached,
    )


def _sequence(parts: Sequence[TokenDelta]) -> SampledSequence:
    rows = [part.topk_logprobs for part in parts if part.topk_logprobs is not None]
    return SampledSequence(
        tokens=np.array([token for part in parts for token in part.tokens], np.int32),
        logprobs=np.array([logprob for part in parts for logprob in part.logprobs], np.float32),
        stop_reason=parts[-1].stop_reason or StopReason.ABORTED,
        topk_logprobs=concatenated(rows) if rows else None,
        version_spans=parts[-1].version_spans,
    )

"""Sampling: each request is one Sample call to a sampler, with its prompt and settings in JSON."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from pydantic import ConfigDict, Field, model_validator

from gateway.http.json_bodies import Integers, Objects, Texts, without_nulls
from gateway.http.services import Services
from gateway.http.tinker import tensors
from gateway.http.tinker.futures import PROTOBUF, Futures, Kind, Posted, Result
from gateway.http.tinker.names import Aliases
from gateway.http.tinker.store import Sampler, Store
from gateway.http.tinker.training import Body
from paceline import errors
from paceline.requests.bodies import decoded
from paceline.types import ModelRef, SampleResult, SamplingParams, StopReason
from paceline.types.sampling import unsigned_seed
from paceline.types.training import Array

_SECONDS = 86_400.0
"""Deadline of a sample. It ends with its session, long before; after a deadline it would be drawn from its start."""
_MAX_SEED = 2**63
_TOKEN_BYTES = 8
_FIELDS = {
    r"^params\.stop_token_ids\b.*": "sampling_params.stop",
    r"^params\.": "sampling_params.",
    r"^topk_logprobs$": "topk_sample_logprobs",
}
"""Fields of the services -> those of this API."""


class Prompt(Body):
    """Parts of a prompt."""

    chunks: Objects

    async def decoded(self) -> Array:
        """Return the tokens. Raises Unsupported, InvalidArgument, EmptyBatch, TokenOutOfRange."""
        given = (chunk.get("tokens") for chunk in self.chunks)
        size = _TOKEN_BYTES * sum(len(tokens) for tokens in given if isinstance(tokens, list)) + len(self.chunks)
        return await decoded(size, tensors.prompt_tokens, self.chunks)


class Params(Body):
    """Sampling parameters. Unknown ones are refused, since they would have no effect."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Texts | Integers | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return without_nulls(body)


class Asample(Body):
    """Request of asample."""

    sampling_session_id: str
    seq_id: int = Field(ge=0, lt=2**62)
    prompt: Prompt
    sampling_params: Params = Params()
    num_samples: int = Field(1, ge=1, le=1_000_000)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1_000_000)
    topk_sample_logprobs: int = Field(0, ge=0, le=1_000_000)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return without_nulls(body)


class Sampling:
    """Executes asample requests."""

    def __init__(
        self, services: Services, store: Store, aliases: Aliases, futures: Futures, secret: bytes, most_calls: int
    ) -> None:
        """Register the kind of work with `futures`. Seeds are derived from `secret`.

        A tenant has at most `most_calls` samples drawn at the same time. That has to be less than all of its calls: it
        may ask for thousands of samples, which would hold up its short calls until they end.
        """
        self._secret = secret
        self._most_calls = most_calls
        self._drawing: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """What a tenant's samples wait for, while there are any."""
        self._services = services
        self._store = store
        self._aliases = aliases

        def dump(request: Asample) -> bytes:
            return request.model_dump_json(exclude_unset=True).encode()

        self.sample = futures.add(Kind("sample", dump, Asample.model_validate_json, self._sample))

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Return a sampler of the tenant. Raises RunNotFound."""
        sampler = self._store.sampler(sampler_id)
        if sampler is None or sampler.tenant != tenant:
            raise errors.RunNotFound("no such sampling session; create one", field="sampling_session_id")
        return sampler

    def with_seed(self, request_id: str, request: Asample) -> Asample:
        """Return the request with a seed derived from its id, so that repeating it gives the same samples.

        The seed cannot be guessed: it also depends on a secret from the operating system's random source.
        """
        if request.sampling_params.seed is not None:
            return request
        drawn = hmac.digest(self._secret, request_id.encode(), hashlib.sha256)
        params = request.sampling_params.model_copy(update={"seed": int.from_bytes(drawn[:8], "little") % _MAX_SEED})
        return request.model_copy(update={"sampling_params": params})

    async def _sample(self, tenant: str, posted: Posted[Asample]) -> Result:
        request = posted.request
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(request, name):
                raise errors.Unsupported("is not served; leave it out", field=name)
        if request.prompt_logprobs_last_n is not None and not request.prompt_logprobs:
            message = "has no effect without prompt_logprobs; set that too"
            raise errors.InvalidArgument(message, field="prompt_logprobs_last_n")
        sampler = self.sampler(tenant, request.sampling_session_id)
        drawing = self._drawing.setdefault(tenant, asyncio.Semaphore(self._most_calls))
        try:
            async with drawing:
                result = await self._draw(tenant, sampler, request)
        except errors.VersionNotFound as gone:
            if sampler.version is None:
                raise
            message = (
                f"the weights of this sampling client, version {sampler.version} of {sampler.run_id}, are no longer "
                "kept, since newer ones took their place. Use a client of newer weights; to keep weights, save them "
                "under a name: save_weights_for_sampler(name)"
            )
            raise errors.VersionNotFound(message, field="sampling_session_id") from gone
        if any(sequence.stop_reason is StopReason.ABORTED for sequence in result.sequences):
            raise errors.EngineUnavailable("the sampler ended the sample early; it is drawn again")
        return Result(PROTOBUF, tensors.sample_response(result, request.prompt_logprobs_last_n))

    async def _draw(self, tenant: str, sampler: Sampler, request: Asample) -> SampleResult:
        with _named_as_here():
            return await self._services.sample(
                tenant,
                self._model_of(sampler),
                await request.prompt.decoded(),
                _params(request.sampling_params),
                seconds=_SECONDS,
                num_samples=request.num_samples,
                prompt_logprobs=bool(request.prompt_logprobs),
                topk_prompt_logprobs=request.topk_prompt_logprobs,
                topk_logprobs=request.topk_sample_logprobs,
            )

    def _model_of(self, sampler: Sampler) -> ModelRef:
        if sampler.checkpoint:
            return ModelRef(checkpoint=sampler.checkpoint)
        if sampler.run_id:
            return ModelRef(run_id=sampler.run_id, version=sampler.version)
        return ModelRef(base=self._aliases.served(sampler.base_model))


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Name fields in errors as this API does."""
    try:
        yield
    except errors.PacelineError as error:
        for theirs, ours in _FIELDS.items():
            error.field = re.sub(theirs, ours, error.field)
        raise


def _params(params: Params) -> SamplingParams:
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=0 if params.top_k == -1 else params.top_k,
        seed=None if params.seed is None else unsigned_seed(params.seed),
        stop=[one for one in stop or () if isinstance(one, str)],
        stop_token_ids=[one for one in stop or () if isinstance(one, int)],
        # In Tinker's API an empty list of stops means to continue past the end of sequence.
        ignore_eos=stop is not None and not stop,
    )

"""The client for sampling from one set of weights, and the streams of tokens that it opens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING

import grpc
import numpy as np

from paceline import codec, errors
from paceline.client.connection import Connection
from paceline.client.futures import PacelineFuture
from paceline.client.results import LogprobsResult
from paceline.client.streams import Stream
from paceline.client.tokenizer import get_tokenizer
from paceline.client.transport import Connected, Metadata, Transport, blocking, read
from paceline.codec.training import FLOATS
from paceline.rpc.identity import ROUTE_KEY
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import ModelRef, SampleResult, SamplingParams, StreamedTokens
from paceline.types.hints import hinted
from paceline.types.training import Tokens, as_tokens
from paceline.types.v1 import sampling_pb2, tensor_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_hinted = hinted(
    **{each.name: f"sampling_params=SamplingParams({each.name}=...)" for each in fields(SamplingParams)},
    max_new_tokens="sampling_params=SamplingParams(max_tokens=...)",
    params="sampling_params=...",
    n="num_samples=...",
    top_logprobs="topk_sample_logprobs=...",
    topk_logprobs="topk_sample_logprobs=...",
    prompt_logprobs="include_prompt_logprobs=True",
    logprobs="nothing: the answer has the log-probabilities of the sampled tokens",
)
_ARGUMENTS = {
    "tokens": "prompt",
    "prompt_logprobs": "include_prompt_logprobs",
    "topk_logprobs": "topk_sample_logprobs",
}
"""Arguments by the names of the contract's fields."""
UNLIMITED_NOTICE_SECONDS = 5.0
"""How long a sample without max_tokens may take before the log explains why."""


class SamplingClient(Connected):
    """Samples from one set of weights: the base model, a version of a run, or a sampler checkpoint.

    Created by ServiceClient and TrainingClient, at no cost. Errors of all calls: ModelNotFound, RunNotFound,
    VersionNotFound, CheckpointNotFound, ChecksumMismatch, RankTooLarge, EmptyBatch, OutOfRange, TokenOutOfRange,
    SequenceTooLong, and, once retries are exhausted, Unavailable and Overloaded. Sampling with `json_schema` or `regex`
    also raises InvalidArgument and Unsupported.
    """

    def __init__(self, transport: Transport, model: ModelRef) -> None:
        super().__init__(transport)
        self.model = model
        """The weights that calls request."""
        self._wire_model = codec.model_ref_to_proto(model)
        self._metadata: Metadata = () if model.is_base else ((ROUTE_KEY, str(model)),)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.model}>"

    def __reduce__(self) -> tuple[Callable[[Connection, ModelRef], SamplingClient], tuple[Connection, ModelRef]]:
        """Pickle the connection settings and the weights' reference; the copy opens its own connection."""
        return _restore, (self.transport.connection, self.model)

    @_hinted
    def sample(
        self,
        prompt: Tokens,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> PacelineFuture[SampleResult]:
        """Sample completions of a prompt of P token ids.

        Without `SamplingParams.max_tokens` a completion may fill the context; if that takes long, the log says so, once
        per connection. `include_prompt_logprobs` adds the prompt's log-probabilities (at temperature 1) to the answer;
        `topk_*` > 0 adds the k most likely tokens at each position. A retried call draws new samples unless a seed is
        set.

        prompt: P token ids: a list, an array or a ModelInput.
        num_samples: number of completions.
        sampling_params: how tokens are chosen; None is SamplingParams().
        include_prompt_logprobs: add the log-probability of each token of the prompt.
        topk_prompt_logprobs, topk_sample_logprobs: how many of the likeliest tokens to add at each position of the
            prompt and of the completions; 0 is none.
        """
        request = codec.make(
            pb.SampleRequest,
            model=self._wire_model,
            prompt=_encode_tokens(prompt, "prompt"),
            params=_encode_params(sampling_params),
            num_samples=_checked_count(num_samples),
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_logprobs=topk_sample_logprobs,
        )
        return self.transport.submit(self._sample(request))

    @_hinted
    def sample_stream(
        self, prompt: Tokens, num_samples: int = 1, sampling_params: SamplingParams | None = None
    ) -> SampleStream:
        """Sample completions and stream their tokens: `for delta in ...` or `async for delta in ...`.

        Completions are interleaved; `delta.index` identifies them. No retries after the first tokens arrive.

        prompt, num_samples, sampling_params: as in `sample`.
        """
        request = codec.make(
            pb.SampleStreamRequest,
            model=self._wire_model,
            prompt=_encode_tokens(prompt, "prompt"),
            params=_encode_params(sampling_params),
            num_samples=_checked_count(num_samples),
        )
        return SampleStream(self.transport, request, self._metadata)

    def compute_logprobs(self, prompt: Tokens) -> PacelineFuture[LogprobsResult]:
        """Compute the log-probability of each of N >= 2 tokens given the tokens before it, at temperature 1.

        prompt: N token ids.
        """
        request = pb.ComputeLogprobsRequest(model=self._wire_model, tokens=_encode_tokens(prompt, "prompt"))
        return self.transport.submit(self._compute_logprobs(request))

    async def get_base_model_async(self) -> str:
        """Return the name of the weights' base model."""
        info = await self.transport.query(self.transport.sampler.GetServerInfo, pb.GetServerInfoRequest())
        return info.model.name

    get_base_model = blocking(get_base_model_async)

    async def get_tokenizer_async(self) -> PreTrainedTokenizerBase:
        """Return the base model's tokenizer. Needs the package transformers."""
        return await get_tokenizer(self.transport, self.model.base)

    get_tokenizer = blocking(get_tokenizer_async)

    async def _sample(self, request: pb.SampleRequest) -> SampleResult:
        method = self.transport.sampler.Sample
        loop, is_limited = asyncio.get_running_loop(), request.params.HasField("max_tokens")
        notice = None if is_limited else loop.call_later(UNLIMITED_NOTICE_SECONDS, self._explain_unlimited)
        try:
            with _named_as_arguments():
                reply = await self.transport.call(method, request, "sampling", self._metadata)
            return codec.sample_result_from_proto(reply)
        finally:
            if notice is not None:
                notice.cancel()

    def _explain_unlimited(self) -> None:
        self.transport.warn_once(
            f"Sample: no answer after {UNLIMITED_NOTICE_SECONDS:g} s; max_tokens is unset, so a completion may fill "
            "the context; to end it earlier, give SamplingParams(max_tokens=...)"
        )

    async def _compute_logprobs(self, request: pb.ComputeLogprobsRequest) -> LogprobsResult:
        method = self.transport.sampler.ComputeLogprobs
        with _named_as_arguments():
            reply = await self.transport.call(method, request, "sampling", self._metadata)
        logprobs = codec.tensor_from_proto(reply.logprobs, "logprobs", FLOATS)
        return LogprobsResult(logprobs, codec.served_model_from_proto(reply.model))


@contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Give the field of a service's error the name of the argument, where the contract has another one."""
    try:
        yield
    except errors.PacelineError as error:
        error.field = _ARGUMENTS.get(error.field, error.field)
        raise


def _restore(connection: Connection, model: ModelRef) -> SamplingClient:
    return SamplingClient(Transport(connection), model)


def _encode_tokens(tokens: Tokens, field: str) -> tensor_pb2.Tensor:
    array = as_tokens(tokens, np.dtype(np.int64), field)
    if array.size == 0:
        raise errors.EmptyBatch("holds no token; give at least one", field=field)
    return codec.tensor_to_proto(array if array.dtype == np.int32 else array.astype(np.int64))


def _checked_count(num_samples: int) -> int:
    """Refuse 0, which in the contract means 1."""
    if isinstance(num_samples, Integral) and num_samples == 0:
        raise errors.OutOfRange("is 0; give 1 or more", field="num_samples")
    return num_samples


def _encode_params(params: SamplingParams | None) -> sampling_pb2.SamplingParams:
    if not isinstance(params, SamplingParams | None):
        raise errors.InvalidArgument.of_type(params, "a paceline.SamplingParams(...)", "sampling_params")
    return codec.sampling_params_to_proto(params or SamplingParams())


class SampleStream(Stream[StreamedTokens]):
    """Completions in progress: iterate once, with `for` or `async for`.

    The request is sent at the first iteration and counts as a call in flight until the stream ends. Leaving the loop
    early cancels it on the server; use `with` or `async with` to cancel it also if an exception that left the loop is
    kept.

    Keep reading: a stream that is not read for the service's `reader_seconds` ends with ReaderStalled, after what had
    already been sent. A stream whose connection is lost ends with Unavailable. `metadata["received_tokens"]` of each
    error is the number of tokens received.
    """

    def __init__(self, transport: Transport, request: pb.SampleStreamRequest, metadata: Metadata) -> None:
        super().__init__(transport)
        self._request = request
        self._metadata = metadata
        self._received = 0
        """Number of tokens received."""

    async def _take(self) -> StreamedTokens | None:
        message = await self._read()
        if message is None:
            return None
        self._received += len(message.tokens)
        return codec.delta_from_proto(message)

    async def _read(self) -> pb.SampleStreamResponse | None:
        if self._call is None:
            method = self._transport.sampler.SampleStream
            try:
                self._call, first = await self._transport.open_stream(method, self._request, "sampling", self._metadata)
            except errors.PacelineError as error:
                own = copy(error)  # calls that wait for the same first connection share its error
                own.metadata = {**error.metadata, "received_tokens": "0"}
                raise own from error
            return first
        try:
            return await read(self._call)
        except grpc.aio.AioRpcError as failure:
            raise self._stream_error(failure) from failure

    def _stream_error(self, failure: grpc.aio.AioRpcError) -> errors.PacelineError:
        """Return the error that ended the stream, with the number of tokens received."""
        error = self._transport.error(failure, self._request, "sampling")
        error.metadata["received_tokens"] = str(self._received)
        if isinstance(error, errors.Unavailable):
            received = f"{self._received} tokens had been received; sample again for the rest"
            message = f"{error.message}; {received}"
            return type(error)(message, field=error.field, metadata=error.metadata, retry_after=error.retry_after)
        return error

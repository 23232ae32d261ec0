"""Encode and decode the inputs and outputs of sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.codec.messages import make
from paceline.codec.models import served_model_from_proto, served_model_to_proto
from paceline.codec.training import FLOATS, INTEGERS, tensor_from_proto, tensor_to_proto
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.types import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
    StreamedTokens,
    TopkLogprobs,
    VersionSpan,
)
from paceline.types.v1 import sampling_pb2 as pb


def sampling_params_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Encode sampling parameters."""
    return make(
        pb.SamplingParams,
        "params.",
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        top_k=params.top_k,
        min_p=params.min_p,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        json_schema=params.json_schema,
        regex=params.regex,
    )


def sampling_params_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Decode sampling parameters; unset ones keep their defaults."""
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else None,
        top_k=message.top_k,
        min_p=message.min_p,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        json_schema=message.json_schema,
        regex=message.regex,
    )


def sample_result_to_proto(result: SampleResult) -> sampler_pb.SampleResponse:
    """Encode the completions of one prompt."""
    return sampler_pb.SampleResponse(
        sequences=[_sequence_to_proto(sequence) for sequence in result.sequences],
        model=served_model_to_proto(result.model),
        prompt_logprobs=None if result.prompt_logprobs is None else tensor_to_proto(result.prompt_logprobs),
        topk_prompt_logprobs=_topk_to_proto(result.topk_prompt_logprobs),
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens,
    )


def sample_result_from_proto(message: sampler_pb.SampleResponse) -> SampleResult:
    """Decode the completions of one prompt."""
    prompt_logprobs = None
    if message.HasField("prompt_logprobs"):
        prompt_logprobs = tensor_from_proto(message.prompt_logprobs, "prompt_logprobs", FLOATS)
    has_topk = message.HasField("topk_prompt_logprobs")
    return SampleResult(
        sequences=[_sequence_from_proto(sequence) for sequence in message.sequences],
        model=served_model_from_proto(message.model),
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=_topk_from_proto(message.topk_prompt_logprobs) if has_topk else None,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


def delta_from_proto(message: sampler_pb.SampleStreamResponse) -> StreamedTokens:
    """Decode the new tokens of a stream."""
    return StreamedTokens(
        index=message.index,
        tokens=list(message.tokens),
        logprobs=list(message.logprobs),
        stop_reason=StopReason(message.stop_reason) if message.stop_reason else None,
        model=served_model_from_proto(message.model),
        version_spans=_spans_from_proto(message.version_spans),
    )


def spans_to_proto(spans: Iterable[VersionSpan]) -> list[pb.VersionSpan]:
    """Encode which version sampled each token."""
    return [pb.VersionSpan(version=span.version, start=span.start, mixed=span.mixed) for span in spans]


def _spans_from_proto(spans: Iterable[pb.VersionSpan]) -> Sequence[VersionSpan]:
    return tuple(VersionSpan(span.version, span.start, span.mixed) for span in spans)


def _sequence_to_proto(sequence: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        tokens=tensor_to_proto(sequence.tokens),
        logprobs=tensor_to_proto(sequence.logprobs),
        stop_reason=pb.StopReason.ValueType(sequence.stop_reason.value),
        topk_logprobs=_topk_to_proto(sequence.topk_logprobs),
        version_spans=spans_to_proto(sequence.version_spans),
    )


def _sequence_from_proto(message: pb.SampledSequence) -> SampledSequence:
    return SampledSequence(
        tokens=tensor_from_proto(message.tokens, "tokens", INTEGERS),
        logprobs=tensor_from_proto(message.logprobs, "logprobs", FLOATS),
        stop_reason=StopReason(message.stop_reason),
        topk_logprobs=_topk_from_proto(message.topk_logprobs) if message.HasField("topk_logprobs") else None,
        version_spans=_spans_from_proto(message.version_spans),
    )


def _topk_to_proto(topk: TopkLogprobs | None) -> pb.TopkLogprobs | None:
    if topk is None:
        return None
    return pb.TopkLogprobs(token_ids=tensor_to_proto(topk.token_ids), logprobs=tensor_to_proto(topk.logprobs))


def _topk_from_proto(message: pb.TopkLogprobs) -> TopkLogprobs:
    return TopkLogprobs(
        token_ids=tensor_from_proto(message.token_ids, "token_ids", INTEGERS, ndim=2),
        logprobs=tensor_from_proto(message.logprobs, "logprobs", FLOATS, ndim=2),
    )

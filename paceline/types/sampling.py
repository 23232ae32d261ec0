"""Inputs and outputs of sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import Any

from paceline.errors import InvalidArgument
from paceline.types.hints import hinted_fields
from paceline.types.model import ServedModel
from paceline.types.reprs import ShortRepr
from paceline.types.training import Array, ComparedByValue


class StopReason(Enum):
    """Why a sequence ended. The values are those on the wire."""

    STOP = 1
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = 2
    """max_tokens or the context length."""
    ABORTED = 3
    """The server ended it early."""


@hinted_fields(
    max_new_tokens="max_tokens=...",
    n="num_samples=... to sample()",
    num_samples="num_samples=... to sample()",
    do_sample="temperature=0 for greedy sampling",
    stop_sequences="stop=...",
    top_logprobs="topk_logprobs=... to sample()",
    logprobs="nothing: the answer has the log-probabilities of the sampled tokens",
)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens."""

    max_tokens: int | None = None
    """Maximum number of tokens of a completion.

    None means no limit of its own: a completion without an end-of-sequence token, stop token or stop string fills the
    context, which can take minutes.
    """
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Choose among the likeliest tokens with this probability in all, above 0 and at most 1."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Choose among tokens at least this likely, relative to the likeliest; 0 is off."""
    seed: int | None = None
    """The same seed gives the same samples. None means that the server draws one from the operating system."""
    stop: Sequence[str] = ()
    """Strings that end a sequence; their tokens stay in it. A single string is one stop string, not its characters.

    Token ids given here, as Tinker's API accepts them, are moved to `stop_token_ids`.
    """
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a sequence; they stay in it."""
    ignore_eos: bool = False
    """Continue past an end-of-sequence token."""
    min_tokens: int = 0
    """Least number of tokens before an end-of-sequence or stop token."""
    json_schema: str = ""
    """JSON Schema as text, such as `json.dumps(Model.model_json_schema())`, to which completions conform.

    Cannot be combined with `regex`, `ignore_eos` or `min_tokens`. Logprobs are under the constrained distribution.
    """
    regex: str = ""
    """Regular expression that the whole completion matches."""

    def __post_init__(self) -> None:
        strings, tokens = _sort_stops(_as_list(self.stop if self.stop is not None else ()))
        object.__setattr__(self, "stop", tuple(strings))
        object.__setattr__(self, "stop_token_ids", (*_token_ids(self.stop_token_ids), *tokens))


def unsigned_seed(seed: int) -> int:
    """Return the seed that a signed one of 64 bits stands for, as in two's complement; any other is the same."""
    return seed % 2**64 if -(2**63) <= seed < 0 else seed


def _as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else [values]


def _sort_stops(stops: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Separate strings from token ids. Raises InvalidArgument for anything else."""
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) and not _is_token_id(stop):
            message = f"is a {type(stop).__name__}; give a string, or a token id in stop_token_ids"
            raise InvalidArgument(message, field=f"stop[{index}]")
    return [stop for stop in stops if isinstance(stop, str)], [int(stop) for stop in stops if not isinstance(stop, str)]


def _token_ids(tokens: Any) -> list[int]:
    ids = _as_list(tokens)
    for index, token in enumerate(ids):
        if not _is_token_id(token):
            message = f"is a {type(token).__name__}; give token ids, and strings in stop"
            raise InvalidArgument(message, field=f"stop_token_ids[{index}]")
    return [int(token) for token in ids]


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TopkLogprobs(ComparedByValue, ShortRepr):
    """The k most likely tokens at each of n positions."""

    token_ids: Array
    """int32, shape [n, k]; -1 where fewer are known."""
    logprobs: Array
    """float32, shape [n, k]; NaN where fewer are known."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """A span of a completion's tokens computed with one version, when weights are written in place."""

    version: int
    """0 is the base model."""
    start: int
    """Index of the first token; the span ends where the next one begins."""
    mixed: bool = False
    """Whether the version was being written meanwhile, so that a token may mix it with the previous version."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampledSequence(ComparedByValue, ShortRepr):
    """One completion of T tokens."""

    tokens: Array
    """int32, shape [T], including the stop token."""
    logprobs: Array
    """float32, shape [T], under the distribution that was sampled from."""
    stop_reason: StopReason
    """Why it ended."""
    topk_logprobs: TopkLogprobs | None = None
    """The most likely tokens at each of the T positions, if asked for."""
    version_spans: Sequence[VersionSpan] = ()
    """The version that computed each token; set if weights are written in place (bridge `shared`)."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampleResult(ComparedByValue, ShortRepr):
    """The completions of one prompt of P tokens."""

    sequences: list[SampledSequence]
    """The completions, as many as were asked for."""
    model: ServedModel
    """The weights that produced every token; if they are written in place, those at the start."""
    prompt_logprobs: Array | None = None
    """float32, shape [P], NaN at position 0."""
    topk_prompt_logprobs: TopkLogprobs | None = None
    """The most likely tokens at each of the P positions, if asked for; none at position 0."""
    prompt_cache_hit_tokens: int = 0
    """Tokens of the prompt that were taken from the cache."""


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """New tokens of one completion in a stream."""

    index: int
    """Sample index of the completion."""
    tokens: list[int]
    """New token ids."""
    logprobs: list[float]
    """Their log-probabilities, under the distribution that was sampled from."""
    stop_reason: StopReason | None = None
    """Set on the completion's last message."""
    model: ServedModel = field(default_factory=lambda: ServedModel(""))
    """The weights that produced them."""
    version_spans: Sequence[VersionSpan] = ()
    """Set on the completion's last message, for all its tokens, if weights are written in place."""

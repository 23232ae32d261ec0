"""The protocol of sampler engines, which is all that the service uses of them. Imports neither torch nor vllm."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.types import ModelInfo, SamplingParams, StopReason, TopkLogprobs, VersionSpan
from paceline.types.training import Array


class EngineUnfit(RuntimeError):
    """The engine's library is not a supported version, or cannot run as configured. The message says what to do."""


class Contents(Protocol):
    """Guards files that an engine reads by name, because others may replace them after they were verified."""

    async def verified(self) -> None:
        """Return if the files are still those that were verified; called after the engine has read them.

        Raises ChecksumMismatch; then no request may be answered from what was read.
        """
        ...

    async def verify_again(self) -> None:
        """Verify every byte again, before the files are read again. Raises ChecksumMismatch, OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter. `name` and `path` are never reused, because engines cache by them."""

    adapter_id: int
    """From 1, never reused within a process."""
    name: str
    path: Path
    """Directory with adapter_model.safetensors and adapter_config.json; it exists while the adapter is loaded."""
    in_memory: bool = False
    """Whether the files are in memory and nobody else can change them, so that they can be mapped instead of read."""
    contents: Contents | None = field(default=None, compare=False)
    """Guard of its files; None if nobody can replace them."""


def first_seed(seed: int) -> int:
    """Return the seed of a request's first sample, 0 to 2^62 - 1; sample i has this seed plus i.

    The hash spreads seeds so far apart that two requests share no sample's seed (requests with consecutive seeds would
    otherwise share all but one).
    """
    return int.from_bytes(hashlib.sha256(seed.to_bytes(8, "little")).digest()[:8], "little") >> 2


AT_ONCE = 1 << 48
"""What is taken from a priority so that the completion starts beyond the engine's usual number, if that is reached."""


def priority_of(sample: int, first: int) -> int:
    """Return a sample's priority, given that of the request's first: samples take turns, and only the first at once."""
    return first % AT_ONCE + sample if sample else first


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Breakdown of the time that loading an adapter took."""

    step_wait_milliseconds: float
    """Waiting for the engine's running step and for calls queued before this one."""
    apply_milliseconds: float
    """Making the adapter usable; meanwhile no request advances."""
    in_slot: bool = True
    """Whether the adapter is in a slot. If not, running requests use every slot, and the first step that schedules a
    request for this adapter puts it into a slot that has become free."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory that an engine reserves for adapters when it starts."""

    count: int = 0
    """0 for an engine that allocates memory for each adapter when it is loaded."""
    size_bytes: int = 0
    """Total size of all slots."""


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """How tokens reach their reader, which may be slower than the engine."""

    eager: bool = True
    """Whether tokens are delivered as soon as possible; otherwise they are collected for a short time first."""
    max_unread: int | None = None
    """Most tokens that may wait for the reader, over all completions; None means no limit."""
    overflowed: Callable[[], None] = _nothing
    """Called once when more than that wait; the callee must give up the reader and cancel the request."""
    sampled: Callable[[int], None] | None = None
    """Called with a number of tokens as the engine delivers them; None costs nothing."""
    completed: Callable[[], None] = _nothing
    """Called for each completion when its last token is sampled. Tokens may still wait for the reader."""
    ended: Callable[[], None] = _nothing
    """Called once when the engine has finished the request and no longer needs the weights. Tokens may still wait."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Completions of one prompt."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    num_samples: int = 1
    adapter: Adapter | None = None
    """None means the base model."""
    tenant: str = ""
    """Salt of the prefix cache, so that no tenant hits another's entries."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    delivery: Delivery = Delivery()
    priority: int = 0
    """Of the first sample, which starts before what waits with a higher number; see `priority_of` for the others."""


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one completion."""

    index: int
    """Sample index."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities under the distribution that was sampled from (after temperature and filters)."""
    stop_reason: StopReason | None = None
    """Set on the completion's last delta."""
    topk_logprobs: TopkLogprobs | None = None
    """One row per token of this delta."""
    prompt_logprobs: Array | None = None
    """float32, shape [P], NaN at 0. If requested, set on the first delta of the request only."""
    topk_prompt_logprobs: TopkLogprobs | None = None
    prompt_cache_hit_tokens: int = 0
    version_spans: Sequence[VersionSpan] = ()
    """Which version each token is of. Set on the last delta of a completion if weights are written in place."""


class TextEndpoint(Enum):
    """A call of OpenAI's API. The values are those of the protobuf enum."""

    CHAT_COMPLETIONS = 1
    COMPLETIONS = 2


Place = Callable[[int, int, int], AbstractAsyncContextManager[int]]
"""Called with the number of prompt tokens, the number of completions and the most tokens of each. Returns a context
manager that waits for the request's places in the engine, holds them and gives the first one's priority. Raises the
error with which the service refuses the request."""


Turn = Callable[[], AbstractAsyncContextManager[object]]
"""Makes a context manager that waits until a tenant may use what can serve only one at a time, and holds it."""


@dataclass(frozen=True, slots=True)
class TextSampling:
    """What a call of OpenAI's API asks to be sampled from each of its prompts."""

    params: SamplingParams
    """`max_tokens` may be more than a prompt leaves of the context, which ends the completion then."""
    num_samples: int = 1
    topk_logprobs: int | None = None
    """Of each sampled token; None means no log-probabilities in the answer."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to return at each position of a prompt; None means not even the prompt's own."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit."""
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] = ()
    """The only tokens that may be sampled; empty means all."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One call of OpenAI's API."""

    endpoint: TextEndpoint
    body: dict[str, Any]
    """The request body's other fields, checked to be supported."""
    sampling: TextSampling
    adapter: Adapter | None
    """None means the base model."""
    tenant: str
    place: Place
    see: Callable[[Iterable[float]], None]
    """Called with the log-probabilities of sampled tokens; raises if the tokens must not be passed on."""
    scored: Callable[[Iterable[float]], None] = lambda logprobs: None
    """The same, for the log-probabilities of a prompt."""
    ended: Callable[[], None] = lambda: None
    """Called once all tokens are sampled, perhaps long before a slow reader has them."""
    turn: Turn = nullcontext
    """For checking a constraint that is not known."""


class SamplerEngine(Protocol):
    """An engine, called from the service's event loop."""

    name: str
    """"vllm" or "hf"."""
    version: str
    """Version of the engine's library."""

    def describe(self) -> ModelInfo:
        """Describe the loaded base model and the largest adapter."""
        ...

    def slots(self) -> Slots:
        """Describe the memory reserved for adapters."""
        ...

    async def start(self) -> None:
        """Load the base model; return when the engine can serve."""
        ...

    async def stop(self) -> None:
        """Stop the engine and free its memory; requests in progress end with ABORTED."""
        ...

    async def check_health(self) -> None:
        """Raise EngineUnavailable if the engine cannot serve."""
        ...

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        """Load an adapter; when this returns, the next scheduler step can use it.

        Raises RankTooLarge, or InvalidShape if a module of the adapter is not in the base model: no part of an adapter
        is ever silently ignored. Raises FileNotFoundError if its files are removed meanwhile.
        """
        ...

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter that no request uses. Unknown adapters are ignored."""
        ...

    async def check_constraint(self, params: SamplingParams, turn: Turn) -> None:
        """Check `json_schema` or `regex` before the request takes places in the engine; this can take seconds.

        A constraint that is not known waits for its `turn`. Raises InvalidArgument if no grammar can be built,
        Unsupported if the engine has no structured outputs, EngineUnavailable.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Yield tokens as they are sampled. Closing the iterator early frees the request within one scheduler step.

        Raises InvalidArgument if no grammar can be built from `json_schema` or `regex`, and Unsupported if the engine
        has no structured outputs, both before anything is queued.
        """
        ...

    async def compute_logprobs(
        self, tokens: list[int], adapter: Adapter | None, tenant: str, priority: int = 0
    ) -> Array:
        """Return the log-probability of each token given the previous ones, at temperature 1.

        float32, shape [N], NaN at 0. `priority` is as in a GenerationRequest.
        """
        ...

    def complete_text(self, request: TextRequest) -> AsyncGenerator[bytes]:
        """Yield the response to a call of OpenAI's API as JSON, whole or event by event.

        Closing the iterator early frees the request. Raises InvalidArgument if the call is invalid, Unsupported if the
        engine does not serve this API.
        """
        ...

    def num_running(self) -> int:
        """Return the number of completions that are waiting or running."""
        ...


@runtime_checkable
class ModelEngine(SamplerEngine, Protocol):
    """An engine whose model can be replaced while the service runs."""

    @property
    def model_path(self) -> Path:
        """Return the directory, or the name, of the base model."""
        ...

    async def change_model(self, model_path: Path, contents: Contents | None = None) -> None:
        """Serve another model of the same shape from now on; no request may be in progress.

        `contents` guards its files, which were just verified; None for the base model. Raises ModelNotLoadable if it
        cannot be loaded, and ChecksumMismatch if its files were replaced; the engine then keeps serving the previous
        model. Raises EngineUnavailable if it cannot, as after writing in place from replaced files; then it is dead.
        """
        ...


@runtime_checkable
class WritableEngine(SamplerEngine, Protocol):
    """An engine whose weights are written while it serves. Completions continue with the new weights."""

    async def begin_write(self, version: int) -> None:
        """Return when the weights may be written: no step is running, and no cached prefix will be used again.

        An engine configured not to pause keeps running, and marks tokens sampled during the write as mixed.
        """
        ...

    async def end_write(self, version: int) -> None:
        """Resume; tokens sampled from now on are of `version`."""
        ...

    async def write_weights(self, directory: Path) -> None:
        """Write the weights of a verified Hugging Face model, between `begin_write` and `end_write`.

        Raises EngineUnavailable.
        """
        ...

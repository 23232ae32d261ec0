"""What a sampler engine does. The service knows engines by this protocol alone; nothing here imports torch or vllm."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.types import ModelInfo, SamplingParams, StopReason, TopkLogprobs, VersionSpan
from paceline.types.training import Array


class EngineUnfit(RuntimeError):
    """The engine's library is another one than is known here. The message is a sentence that says what to do."""


class Contents(Protocol):
    """What was verified of the files that an engine reads by name: others may replace those at any moment."""

    async def verified(self) -> None:
        """Return if the files that were read are those that were verified. Asked after they were read.

        Raises ChecksumMismatch; then nothing may be answered from what was read.
        """
        ...

    async def verify_again(self) -> None:
        """Verify every byte once more, before the files are read again. Raises ChecksumMismatch, OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter. `name` and `path` are unique for ever: engines cache by them."""

    adapter_id: int
    """From 1, never reused within a process."""
    name: str
    path: Path
    """Directory with adapter_model.safetensors and adapter_config.json; stays in place while the adapter is loaded."""
    in_memory: bool = False
    """Whether the files lie in memory and in nobody else's hands, so that they can be mapped instead of read."""
    contents: Contents | None = field(default=None, compare=False)
    """What its files were verified to be; None where nobody can replace them."""


def first_seed(seed: int) -> int:
    """Return the seed of a request's first sample, sample i having this one plus i: 0 to 2^62 - 1.

    A hash spreads the seeds of requests so far apart that the samples of any two share none (64-bit seeds that follow
    each other would share all but one).
    """
    return int.from_bytes(hashlib.sha256(seed.to_bytes(8, "little")).digest()[:8], "little") >> 2


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Where the time of loading an adapter went."""

    step_wait_milliseconds: float
    """Waiting for the step that the engine was in, and for whatever stood in line before."""
    apply_milliseconds: float
    """Making the adapter usable, during which no request advances."""
    in_slot: bool = True
    """Whether it is in place for the next step. If not, requests that run use every slot, and the first step that
    schedules one for this adapter puts it into a slot that has become free."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory that an engine sets aside for adapters when it starts."""

    count: int = 0
    """0 for an engine that takes memory for each adapter as it comes."""
    size_bytes: int = 0
    """Of all of them together."""


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """How tokens reach their reader, who need not keep up with the engine."""

    eager: bool = True
    """Whether tokens are wanted as they come; otherwise those of some time come together."""
    max_unread: int | None = None
    """Tokens of all completions together that may wait for the reader; None means any number."""
    overflowed: Callable[[], None] = _nothing
    """Called once when more wait: the reader has to be given up, and with it the request."""
    completed: Callable[[], None] = _nothing
    """Called for each completion when its last token is sampled. Tokens may wait still."""
    ended: Callable[[], None] = _nothing
    """Called once when the engine has done with the request: it needs the weights no more. Tokens may wait still."""


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
    """Salt of the prefix cache: no tenant hits another's entries."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    delivery: Delivery = Delivery()


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one completion."""

    index: int
    """Sample index."""
    tokens: list[int]
    logprobs: list[float]
    """Under the distribution that was sampled from (after temperature and filters)."""
    stop_reason: StopReason | None = None
    """Set on the completion's last delta."""
    topk_logprobs: TopkLogprobs | None = None
    """One row per token of this delta."""
    prompt_logprobs: Array | None = None
    """float32, shape [P], NaN at 0. Set once, on the first delta of the request, when asked for."""
    topk_prompt_logprobs: TopkLogprobs | None = None
    prompt_cache_hit_tokens: int = 0
    version_spans: Sequence[VersionSpan] = ()
    """Set on the last delta of a completion where weights are written in place: which version its tokens are of."""


class TextEndpoint(Enum):
    """Which call of OpenAI's API is meant. The values are those of the wire."""

    CHAT_COMPLETIONS = 1
    COMPLETIONS = 2


Place = Callable[[int, int, int], AbstractAsyncContextManager[None]]
"""Takes the tokens of a prompt, the number of completions and the most tokens of each; a context manager that waits for
the request's turn and holds it. Raises what the service refuses."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One call of OpenAI's API."""

    endpoint: TextEndpoint
    body: dict[str, Any]
    """Fields that are known, by name."""
    adapter: Adapter | None
    """None means the base model."""
    tenant: str
    place: Place
    see: Callable[[Iterable[float]], None]
    """Is shown the log-probabilities of sampled tokens, and raises where they must not be passed on."""


class SamplerEngine(Protocol):
    """Runs in the service's own event loop."""

    @property
    def name(self) -> str:
        """Return "vllm" or "hf"."""
        ...

    @property
    def version(self) -> str:
        """Return the version of the engine's library."""
        ...

    def describe(self) -> ModelInfo:
        """Say what base model is loaded and how large an adapter may be."""
        ...

    def slots(self) -> Slots:
        """Say what memory is set aside for adapters."""
        ...

    async def start(self) -> None:
        """Load the base model. Returns when the engine can serve."""
        ...

    async def stop(self) -> None:
        """End the engine and free its memory; requests in progress end with ABORTED."""
        ...

    async def check_health(self) -> None:
        """Raise EngineUnavailable when the engine cannot serve."""
        ...

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        """Load an adapter; when this returns, the next scheduler step can use it. The files have been verified.

        Raises RankTooLarge, or InvalidShape when the adapter matches no module of the base model: it is never
        silently left out.
        """
        ...

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter that no request uses. Unknown adapters are ignored."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Yield tokens as they are sampled. Closing the iterator early frees the request within one scheduler step.

        Raises InvalidArgument when no grammar can be made of `json_schema` or `regex`, and Unsupported when the engine
        has no structured outputs, both before anything is queued.
        """
        ...

    async def compute_logprobs(self, tokens: list[int], adapter: Adapter | None, tenant: str) -> Array:
        """Return the log-probability of each token given those before it, at temperature 1.

        float32, shape [N], NaN at 0.
        """
        ...

    def complete_text(self, request: TextRequest) -> AsyncGenerator[bytes]:
        """Yield the answer to a call of OpenAI's API as JSON: whole, or event by event. Closing it early frees it.

        Raises InvalidArgument for what the call may not have, Unsupported where the engine has no such API.
        """
        ...

    def num_running(self) -> int:
        """Return how many completions are waiting or running."""
        ...


@runtime_checkable
class ModelEngine(SamplerEngine, Protocol):
    """An engine whose model can be exchanged while the service lives."""

    @property
    def model_path(self) -> Path:
        """Return the directory, or the name, of the base model."""
        ...

    async def change_model(self, model_path: Path, contents: Contents | None = None) -> None:
        """Serve another model of the same shape from here on; no request is in progress.

        `contents` is what its files were just verified to be; None for the base model. Raises ModelNotLoadable when it
        cannot be served, and ChecksumMismatch when its files were replaced; then the model before it goes on serving.
        Raises EngineUnavailable when neither can; then the engine is dead.
        """
        ...


@runtime_checkable
class WritableEngine(SamplerEngine, Protocol):
    """An engine whose weights are written while it serves. Completions go on with what was written."""

    async def begin_write(self, version: int) -> None:
        """Return when the weights may be written: no step runs, and no cached prefix will be used again.

        An engine that is told not to pause goes on, and marks the tokens that come meanwhile as mixed.
        """
        ...

    async def end_write(self, version: int) -> None:
        """Go on: tokens that come from here on are of `version`."""
        ...

    async def write_weights(self, directory: Path) -> None:
        """Write the weights from a Hugging Face model, which was verified, between `begin_write` and `end_write`.

        Raises EngineUnavailable.
        """
        ...

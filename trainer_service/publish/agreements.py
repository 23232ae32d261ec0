"""Whether samplers compute what the trainer computes: both score the same tokens, with the base model and a version.

The trainer scores with a run of its own that lives for one pass: an adapter that was just made changes nothing, and one
that is loaded from a version's files is the version. So no run is touched, and no publish waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Gauge

from paceline import codec, errors
from paceline.agreement import PROBE_TOKENS
from paceline.layout import new_run_id
from paceline.log import get_logger
from paceline.types import Datum, LoraConfig, ModelRef
from paceline.types.training import Array
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.engine.base import EngineDiedError
from trainer_service.engine.process import EngineProcess
from trainer_service.publish.feed import Watcher
from trainer_service.runs.record import RunRecord

_RETRY_SECONDS, _MOST_ATTEMPTS = 2.0, 150
"""Between attempts while the engine is away, and how many there are before the sampler watches anew."""
_SMALLEST = [
    LoraConfig(rank=1, train_attn=group == "attn", train_mlp=group == "mlp", train_unembed=group == "unembed")
    for group in ("attn", "mlp", "unembed")
]
"""Adapters that change nothing; a model may not take one on all of its parts."""

_log = get_logger(__name__)
T = TypeVar("T")
Find = Callable[[RunRecord, int], Path]


class Agreements:
    """Has samplers that watch measured, and knows what came of it."""

    def __init__(self, engine: EngineProcess, find: Find, metrics: CollectorRegistry) -> None:
        """Take what finds a version's directory."""
        self._engine = engine
        self._find = find
        self._known: dict[str, dict[bool, pb.Agreement]] = {}
        """By sampler; of the base model (True) and of the version that was compared last."""
        self._measured: dict[Watcher, set[str]] = {}
        """Runs of which each watcher was sent a version to score."""
        self._base: tuple[Array, Array] | None = None
        self._scoring = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], Watcher] = {}
        self._difference = Gauge(
            "paceline_trainer_sampler_logprob_difference",
            "Absolute difference of log-probabilities between trainer and sampler",
            ("sampler", "weights", "statistic"),
            registry=metrics,
        )

    def all(self) -> list[pb.Agreement]:
        """Return what is known of the samplers that watch."""
        return [one for _, known in sorted(self._known.items()) for _, one in sorted(known.items(), reverse=True)]

    def joined(self, watcher: Watcher) -> None:
        """Have a sampler that has just come score tokens with the base model."""
        self._measured[watcher] = set()
        self._spawn(watcher, self._probe_base(watcher))

    def acknowledged(self, watcher: Watcher, run: RunRecord, version: int) -> None:
        """Have a sampler score tokens with the first version that it has, and with the first of each run."""
        measured = self._measured.get(watcher)
        is_first = not measured or version == 1
        if measured is None or run.run_id in measured or not is_first or not isinstance(run.parameters, LoraConfig):
            return
        measured.add(run.run_id)
        self._spawn(watcher, self._probe_version(watcher, run, version))

    def heard(self, watcher: Watcher, agreement: pb.Agreement) -> None:
        """Take in what a sampler measured."""
        agreement.sampler_id = watcher.sampler_id
        is_base = not agreement.model.run_id
        self._known.setdefault(watcher.sampler_id, {})[is_base] = agreement
        facts = {
            "sampler": watcher.sampler_id,
            "run": agreement.model.run_id,
            "version": agreement.model.version,
            "mean": agreement.mean_difference,
            "max": agreement.max_difference,
            "bound": agreement.bound,
        }
        if agreement.refusal:
            _log.error("a sampler does not compute what the trainer computes", refusal=agreement.refusal, **facts)
        else:
            _log.info("sampler agrees", **facts)
        for statistic in ("mean", "max"):
            self._label(watcher, statistic, is_base=is_base).set(getattr(agreement, f"{statistic}_difference"))

    def left(self, watcher: Watcher, *, is_gone: bool) -> None:
        """Forget a watcher, and where no other has its name what is known of the sampler."""
        self._measured.pop(watcher, None)
        for task in [task for task, other in self._tasks.items() if other is watcher]:
            task.cancel()
        if is_gone:
            for is_base in self._known.pop(watcher.sampler_id, {}):
                for statistic in ("mean", "max"):
                    labels = (watcher.sampler_id, _kind(is_base=is_base), statistic)
                    with suppress(KeyError):
                        self._difference.remove(*labels)

    def _label(self, watcher: Watcher, statistic: str, *, is_base: bool) -> Gauge:
        return self._difference.labels(watcher.sampler_id, _kind(is_base=is_base), statistic)

    def _spawn(self, watcher: Watcher, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = watcher
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()):
            _log.error("sampler not compared with the trainer", error=str(error))

    async def _probe_base(self, watcher: Watcher) -> None:
        async with self._scoring:
            if self._base is None:
                self._base = await self._when_available(self._score_base)
        self._send(watcher, ModelRef(), *self._base)

    async def _probe_version(self, watcher: Watcher, run: RunRecord, version: int) -> None:
        async with self._scoring:
            tokens = self._tokens()
            logprobs = await self._when_available(lambda: self._score_version(tokens, run, version))
        self._send(watcher, ModelRef(run_id=run.run_id, version=version), tokens, logprobs)

    def _send(self, watcher: Watcher, ref: ModelRef, tokens: Array, logprobs: Array) -> None:
        probe = pb.Probe(
            model=codec.model_ref_to_proto(ref),
            tokens=codec.tensor_to_proto(tokens),
            logprobs=codec.tensor_to_proto(logprobs),
            dtype=self._engine.describe().dtype,
        )
        watcher.outbox.put_nowait(pb.WatchVersionsResponse(probe=probe))

    @staticmethod
    async def _when_available(score: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Score as soon as the engine is there; not again where it may have died of that. Raises EngineUnavailable."""
        attempts = 0
        while True:
            try:
                return await score()
            except errors.EngineUnavailable as error:
                attempts += 1
                if isinstance(error, EngineDiedError) or attempts >= _MOST_ATTEMPTS:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)

    def _tokens(self) -> Array:
        """Return the same random tokens each time, of the whole vocabulary: int32 [N]."""
        model = self._engine.describe()
        size = min(PROBE_TOKENS, model.max_context_length)
        return np.random.default_rng(0).integers(model.vocab_size, size=size, dtype=np.int32)

    async def _score_base(self) -> tuple[Array, Array]:
        tokens, refusal = self._tokens(), errors.PacelineError("")
        for lora in _SMALLEST:
            try:
                return tokens, await self._score(tokens, lora)
            except (errors.InvalidArgument, errors.Unsupported) as error:
                refusal = error
        raise refusal

    async def _score_version(self, tokens: Array, run: RunRecord, version: int) -> Array:
        if not isinstance(run.parameters, LoraConfig):
            raise errors.Unsupported("versions of full-parameter runs are not scored")
        return await self._score(tokens, run.parameters, self._find(run, version))

    async def _score(self, tokens: Array, lora: LoraConfig, directory: Path | None = None) -> Array:
        """Return the log-probability of each token but the first: float32 [N - 1]."""
        async with self._scratch(lora) as run_id:
            if directory is not None:
                await self._engine.load_state(run_id, directory, with_optimizer=False)
            weights = np.ones(len(tokens) - 1, np.float32)
            datum = Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64), "weights": weights})
            output = await self._engine.forward_backward(run_id, [datum], "cross_entropy", {}, forward_only=True)
            return np.asarray(output.loss_fn_outputs[0]["logprobs"], np.float32)

    @asynccontextmanager
    async def _scratch(self, lora: LoraConfig) -> AsyncIterator[str]:
        run_id = new_run_id()
        await self._engine.create_run(run_id, lora)
        try:
            yield run_id
        finally:
            with suppress(errors.EngineUnavailable):  # then it holds no runs
                await self._engine.delete_run(run_id)


def _kind(*, is_base: bool) -> str:
    return "base" if is_base else "version"

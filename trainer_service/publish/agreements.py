"""Check that samplers compute what the trainer computes: both score the same tokens with base model and version.

The trainer scores the base model and adapters with a temporary run that exists for one pass: a fresh adapter changes
nothing, and an adapter loaded from a version's files is that version. No other run is touched, and no publish waits. A
whole model takes too much memory for that. Its own run scores the tokens when it is published, before it computes
anything else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from prometheus_client import CollectorRegistry, Gauge

from paceline import codec, errors
from paceline.agreement import PROBE_TOKENS, STATISTICS, shown_difference
from paceline.layout import new_run_id
from paceline.log import get_logger
from paceline.types import Datum, ForwardBackwardSpec, FullParameters, LoraConfig, ModelRef, WeightStorage
from paceline.types.training import Array
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.protocol import EngineDiedError
from trainer_service.publish.watch_hub import Watcher
from trainer_service.runs.record import RunRecord

_RETRY_SECONDS, _MOST_ATTEMPTS = 2.0, 150
"""Delay between attempts while the engine is unavailable, and their number; the sampler's next watch tries again."""
_SMALLEST = [
    LoraConfig(rank=1, train_attn=group == "attn", train_mlp=group == "mlp", train_unembed=group == "unembed")
    for group in ("attn", "mlp", "unembed")
]
"""Adapters that change nothing, tried in order, because a model may not support one on each of its parts."""

_MOST_UNANSWERED = 5
"""Versions of a full-parameter run scored for a watcher that compares none, such as one that serves adapters."""

_log = get_logger(__name__)
T = TypeVar("T")
Find = Callable[[RunRecord, int], Path]


@dataclass(slots=True)
class _Seen:
    """The versions that a watcher has compared."""

    agreed: set[str] = field(default_factory=set)
    """Runs with a version that was compared and agreed."""
    comparing: dict[str, int] = field(default_factory=dict)
    """LoRA runs of which no version has agreed yet -> the newest version that was compared or will be."""
    queued: set[str] = field(default_factory=set)
    """Those of them whose newest version the trainer has yet to score."""
    refused: dict[str, int] = field(default_factory=dict)
    """The newest version of each run that was compared and disagreed. Results may arrive in any order."""
    unanswered: Counter[str] = field(default_factory=Counter)
    """Number of versions of each full-parameter run scored for the watcher since it last compared one."""


@dataclass(frozen=True, slots=True)
class _Score:
    """What a full-parameter run computed with one of its versions."""

    version: int
    tokens: Array
    logprobs: Array
    dtype: str


class Agreements:
    """Has watching samplers compared with the trainer, and keeps the results."""

    def __init__(self, engine: EngineProcess, find: Find, metrics: CollectorRegistry) -> None:
        """`find` returns a version's directory."""
        self._engine = engine
        self._find = find
        self._known: dict[str, dict[str, pb.Agreement]] = {}
        """By sampler and run: the agreement on the base model ("") and on each run's last compared version."""
        self._seen: dict[Watcher, _Seen] = {}
        self._scores: dict[str, _Score] = {}
        """The last score of each full-parameter run."""
        self._base: tuple[Array, Array] | None = None
        self._scoring = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], Watcher] = {}
        self._difference = Gauge(
            "paceline_trainer_sampler_logprob_difference",
            "Absolute difference of log-probabilities between trainer and sampler",
            ("sampler", "weights", "statistic"),
            registry=metrics,
        )

        self.on_compared: Callable[[pb.Agreement], object] = lambda agreement: None
        """Called with each result of a comparison."""

    def all(self) -> list[pb.Agreement]:
        """Return all agreements of the watching samplers."""
        return [one for _, known in sorted(self._known.items()) for _, one in sorted(known.items())]

    def on_join(self, watcher: Watcher) -> None:
        """Have a sampler that just joined score tokens with the base model."""
        self._seen[watcher] = _Seen()
        self._spawn(watcher, self._probe_base(watcher))

    async def score(self, run: RunRecord, version: int) -> None:
        """Have a full-parameter run score tokens with the weights that become a version, in the publish's turn.

        This takes a pass of 256 tokens. It is done for the run's first version, and while a watching sampler has agreed
        with none. Raises EngineUnavailable; a version that fails for another reason is not compared.
        """
        waiting = [seen for seen in self._seen.values() if run.run_id not in seen.agreed]
        if run.run_id in self._scores and all(seen.unanswered[run.run_id] >= _MOST_UNANSWERED for seen in waiting):
            return
        for seen in waiting:
            seen.unanswered[run.run_id] += 1
        tokens = self._tokens()
        try:
            logprobs = await self._logprobs(run.run_id, tokens)
        except errors.EngineUnavailable:
            raise
        except errors.PacelineError as error:
            _log.warning("version not compared", run=run.run_id, version=version, reason=error.reason, error=str(error))
            return
        self._scores[run.run_id] = _Score(version, tokens, logprobs, self._dtype(run))

    def forget(self, run_id: str) -> None:
        """Forget a deleted run."""
        self._scores.pop(run_id, None)
        for known in self._known.values():
            known.pop(run_id, None)
        for seen in self._seen.values():
            seen.agreed.discard(run_id)
            seen.comparing.pop(run_id, None)
            seen.refused.pop(run_id, None)
            seen.unanswered.pop(run_id, None)

    def acknowledged(self, watcher: Watcher, run: RunRecord, version: int, *, is_refused: bool) -> None:
        """Have a sampler score tokens with the first version of each run that it acknowledges since it joined.

        For a full-parameter run that is the first version that the run scored. Later versions follow until one agrees.
        """
        seen = self._seen.get(watcher)
        if seen is None or (run.run_id in seen.agreed and not is_refused):
            return
        ref = ModelRef(run_id=run.run_id, version=version)
        if not isinstance(run.parameters, LoraConfig):
            known = self._scores.get(run.run_id)
            if known is not None and known.version == version:
                self._send(watcher, ref, known.tokens, known.logprobs, known.dtype)
        else:
            self._compare(watcher, seen, run, version)

    def record(self, watcher: Watcher, agreement: pb.Agreement) -> None:
        """Record what a sampler measured, unless the run was deleted meanwhile."""
        agreement.sampler_id = watcher.sampler_id
        run_id, seen = agreement.model.run_id, self._seen[watcher]
        if run_id:
            if not any(run_id in runs for runs in (seen.agreed, seen.comparing, self._scores)):
                return
            version, refused = agreement.model.version, seen.refused.get(run_id, 0)
            if agreement.refusal:
                seen.refused[run_id] = max(version, refused)
                seen.agreed.discard(run_id)
            # Results come in any order: an older version that agreed does not clear a newer one that was refused.
            elif version > refused:
                seen.agreed.add(run_id)
                seen.comparing.pop(run_id, None)
            seen.unanswered.pop(run_id, None)
        self._known.setdefault(watcher.sampler_id, {})[run_id] = agreement
        self.on_compared(agreement)
        fields = {
            "sampler": watcher.sampler_id,
            "run": run_id,
            "version": agreement.model.version,
            "mean": agreement.mean_difference,
            "max": agreement.max_difference,
            "bound": agreement.bound,
        }
        if agreement.refusal:
            _log.error("sampler disagrees with the trainer", refusal=agreement.refusal, **fields)
        else:
            _log.info("sampler agrees with the trainer", **fields)
        for statistic in STATISTICS:
            gauge = self._difference.labels(watcher.sampler_id, "version" if run_id else "base", statistic)
            gauge.set(shown_difference(agreement, statistic))

    def on_leave(self, watcher: Watcher, *, is_gone: bool) -> None:
        """Forget a watcher, and the sampler's agreements if no other watcher has its name (`is_gone`)."""
        self._seen.pop(watcher, None)
        for task in [task for task, other in self._tasks.items() if other is watcher]:
            task.cancel()
        if is_gone:
            self._known.pop(watcher.sampler_id, None)
            for weights, statistic in product(("base", "version"), STATISTICS):
                with suppress(KeyError):
                    self._difference.remove(watcher.sampler_id, weights, statistic)

    def _compare(self, watcher: Watcher, seen: _Seen, run: RunRecord, version: int) -> None:
        """Have a sampler score a version once; of those that come while the engine is unavailable, only the newest."""
        if version <= seen.comparing.get(run.run_id, 0):
            return
        seen.comparing[run.run_id] = version
        if run.run_id not in seen.queued:
            seen.queued.add(run.run_id)
            self._spawn(watcher, self._probe_version(watcher, seen, run))

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
        self._send(watcher, ModelRef(), *self._base, self._engine.describe().dtype)

    async def _probe_version(self, watcher: Watcher, seen: _Seen, run: RunRecord) -> None:
        async with self._scoring:
            seen.queued.discard(run.run_id)
            version = seen.comparing.get(run.run_id)
            if version is None:  # one agreed, or the run was deleted
                return
            tokens = self._tokens()
            try:
                logprobs = await self._when_available(lambda: self._score_version(run, version, tokens))
            except (errors.PacelineError, OSError):
                if run.run_id in seen.comparing:
                    raise
                return  # the run was deleted meanwhile, and the version with it
        self._send(watcher, ModelRef(run_id=run.run_id, version=version), tokens, logprobs, self._dtype(run))

    def _dtype(self, run: RunRecord) -> str:
        """Return the dtype that a run computes in."""
        full = run.parameters
        in_half = isinstance(full, FullParameters) and full.storage is WeightStorage.BFLOAT16
        return "bfloat16" if in_half else self._engine.describe().dtype

    def _send(self, watcher: Watcher, ref: ModelRef, tokens: Array, logprobs: Array, dtype: str) -> None:
        probe = pb.Probe(
            model=codec.model_ref_to_proto(ref),
            tokens=codec.tensor_to_proto(tokens),
            logprobs=codec.tensor_to_proto(logprobs),
            dtype=dtype,
        )
        watcher.outbox.put_nowait(pb.WatchVersionsResponse(probe=probe))

    @staticmethod
    async def _when_available(score: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Score as soon as the engine is available; no retry if that may have killed it. Raises EngineUnavailable."""
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
        """Return the same random tokens each time, drawn from the whole vocabulary: int32 [N]."""
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

    async def _score_version(self, run: RunRecord, version: int, tokens: Array) -> Array:
        """Score a version of an adapter, also if its staged files are removed meanwhile since the volume has it."""
        lora = cast("LoraConfig", run.parameters)  # a whole model is scored by its run
        directory = self._find(run, version)
        try:
            return await self._score(tokens, lora, directory)
        except (errors.PacelineError, OSError):
            found = self._find(run, version)
            if found == directory:
                raise
            return await self._score(tokens, lora, found)

    async def _score(self, tokens: Array, lora: LoraConfig, directory: Path | None = None) -> Array:
        async with self._scratch(lora) as run_id:
            if directory is not None:
                await self._engine.load_state(run_id, directory, with_optimizer=False)
            return await self._logprobs(run_id, tokens)

    async def _logprobs(self, run_id: str, tokens: Array) -> Array:
        """Return a run's log-probability of each token but the first: float32 [N - 1]."""
        weights = np.ones(len(tokens) - 1, np.float32)
        datum = Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64), "weights": weights})
        spec = ForwardBackwardSpec("cross_entropy", forward_only=True)
        output = await self._engine.forward_backward(run_id, [datum], spec)
        return np.asarray(output.loss_fn_outputs[0]["logprobs"], np.float32)

    @asynccontextmanager
    async def _scratch(self, lora: LoraConfig) -> AsyncIterator[str]:
        run_id = new_run_id()
        await self._engine.create_run(run_id, lora)
        try:
            yield run_id
        finally:
            with suppress(errors.EngineUnavailable):  # a new engine holds no runs
                await self._engine.delete_run(run_id)

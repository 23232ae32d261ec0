"""The engine for LoRA runs: one frozen base model, one adapter for each run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidArgument, NoGradient, NonFiniteGradient, OutOfMemory, PacelineError, RunNotFound
from paceline.types import (
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInfo,
    OptimizerParams,
    OptimStepOutput,
    Reduction,
)
from trainer_service.engine import adapters, state
from trainer_service.engine.base import AdapterInfo, LoadedState
from trainer_service.engine.base_model import load_base_model
from trainer_service.engine.jobs import Job
from trainer_service.engine.loss_specs import loss_spec
from trainer_service.engine.optimizers.base import AnyOptimizer
from trainer_service.engine.optimizers.gradients import gradient_norm
from trainer_service.engine.optimizers.make import check_same, make_optimizer
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.packing import Batch, datum_weights
from trainer_service.engine.passes import PassRunner, Result, Share
from trainer_service.engine.ranks import Ranks
from trainer_service.engine.run import EngineRun, seeded_rng_state
from trainer_service.engine.scheduler import Scheduler
from trainer_service.engine.sharding import ShardedModel

_log = logging.getLogger(__name__)


class PeftEngine:
    """Trains many LoRA runs on one base model, on one device. Implements `TrainerEngine`."""

    def __init__(self, options: EngineOptions, ranks: Ranks | None = None) -> None:
        """Load the base model, dealt over `ranks`, all of which do the same; without them this process is alone."""
        self._ranks = ranks or Ranks.alone()
        self._options = options
        self._device = torch.device(self._ranks.take_device(options.device))
        self._sharded = ShardedModel(lambda: load_base_model(options), self._ranks, self._device)
        self._model = self._sharded.model
        routing = adapters.adapt(self._model)
        self._passes = PassRunner(self._sharded, routing, self._device, options.logprob_chunk)
        self._runs: dict[str, EngineRun] = {}
        self._jobs: list[Job] = []
        self._scheduler: Scheduler[Job] = Scheduler(
            options.pack_tokens, joint=options.joint_passes, ranks=self._ranks.size
        )

    def describe(self) -> ModelInfo:
        config = self._model.config
        return ModelInfo(
            name=self._options.model_name,
            max_context_length=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            dtype=self._options.dtype,
            max_lora_rank=self._options.max_lora_rank,
            num_layers=config.num_hidden_layers,
        )

    def create_run(self, run_id: str, lora: LoraConfig) -> AdapterInfo:
        if run_id in self._runs:
            raise InvalidArgument("a run of this id exists.", field="run_id")
        targets = adapters.target_modules(self._model, lora)
        with _out_of_memory_named():
            adapters.add_adapter(self._model, run_id, lora, targets)
        parameters = adapters.adapter_parameters(self._model, run_id)
        self._runs[run_id] = EngineRun(
            run_id=run_id,
            lora=lora,
            targets=targets,
            parameters=parameters,
            rng_state=seeded_rng_state(lora.seed, self._device),
        )
        return AdapterInfo(sum(parameter.numel() for parameter in parameters.values()))

    def delete_run(self, run_id: str) -> None:
        if self._runs.pop(run_id, None) is not None:
            adapters.remove_adapter(self._model, run_id)
            self._scheduler.forget(run_id)

    def begin(
        self,
        run_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float],
        *,
        forward_only: bool,
        reduction: Reduction = Reduction.SUM,
        reduction_count: int | None = None,
        alone: bool = False,
    ) -> Job:
        run, spec = self._run(run_id), loss_spec(loss_fn)
        config = spec.resolve_config(loss_fn_config)
        weights = datum_weights(data, reduction, reduction_count)
        batch = Batch(data, spec.required_inputs(config), fills=spec.fills(config), weights=weights)
        job = Job(run, data, batch, loss_fn, config, forward_only=forward_only, alone=alone)
        self._jobs.append(job)
        return job

    def advance(self, announce: Callable[[Sequence[str]], None]) -> list[Job]:
        passes = self._scheduler.next_passes(self._jobs)
        if any(passes):
            self._compute(passes, announce)
        done = [job for job in self._jobs if job.is_done]
        self._jobs = [job for job in self._jobs if not job.is_done]
        for job in done:
            self._finish(job)
        return done

    def forward_backward(
        self,
        run_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float],
        **options: Any,
    ) -> ForwardBackwardOutput:
        """Begin a job, with the options of `begin`, and advance until it is done."""
        job = self.begin(run_id, data, loss_fn, loss_fn_config, **options)
        while job not in self.advance(lambda _: None):
            pass
        return job.output()

    def optim_step(self, run_id: str, params: OptimizerParams) -> OptimStepOutput:
        run, start = self._run(run_id), time.perf_counter()
        if not run.has_gradient:
            raise NoGradient("there is no gradient; call forward_backward before optim_step.")
        if run.optimizer is not None:
            check_same(run.optimizer, params)
        tokens = run.pending_tokens
        try:
            norm = gradient_norm(run.parameters.values())
        except NonFiniteGradient:
            run.drop_gradient()
            raise
        optimizer = self._ranks.together(lambda: _ready_optimizer(run, params))
        with _out_of_memory_named():
            learning_rate = optimizer.step(params, run.step + 1, norm)
        run.optimizer = optimizer
        run.drop_gradient()
        run.step += 1
        milliseconds = (time.perf_counter() - start) * 1e3
        return OptimStepOutput(run.step, norm, learning_rate, tokens, milliseconds)

    def save_state(self, run_id: str, directory: Path) -> None:
        state.save(self._run(run_id), directory, self._options.model_name)

    def save_adapter(self, run_id: str, directory: Path) -> None:
        dtype = getattr(torch, self._options.adapter_dtype or self._options.dtype)
        state.save_adapter(self._run(run_id), directory, self._options.model_name, dtype)

    def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        run = self._run(run_id)
        if with_optimizer:
            state.load(run, directory)
        else:
            state.load_adapter(run, directory)
            run.reset(self._device)
        return LoadedState(run.step)

    def _run(self, run_id: str) -> EngineRun:
        if run_id not in self._runs:
            raise RunNotFound("the engine holds no such run; create it first.", field="run_id")
        return self._runs[run_id]

    def _compute(self, passes: Sequence[Sequence[Share]], announce: Callable[[Sequence[str]], None]) -> None:
        """Do one pass on each rank."""
        jobs = list({job.run_id: job for shares in passes for job, _ in shares}.values())
        announce([job.run_id for job in jobs])
        if self._try(passes, jobs):
            return
        for job in jobs:
            self._compute([[share for share in shares if share[0] is job] for shares in passes], announce)

    def _try(self, passes: Sequence[Sequence[Share]], jobs: Sequence[Job]) -> bool:
        """Do passes. If any fails, that is noted if they are of one job, else there is more to try."""
        own = passes[self._ranks.rank]
        work = partial(self._results, own) if own else None
        try:
            results = self._sharded.run(work, with_gradient=not jobs[0].forward_only)
        except Exception as error:
            if len(jobs) > 1:
                _log.warning("a pass of %d runs failed; each is tried by itself: %s", len(jobs), error)
                return False
            jobs[0].fail(error)
        else:
            for result in results or ():
                result.give()
        return True

    def _results(self, shares: Sequence[Share]) -> list[Result]:
        with _out_of_memory_named():
            return self._passes.compute(shares)

    def _finish(self, job: Job) -> None:
        try:
            if job.error is None:
                job.pool(self._ranks)
                with _out_of_memory_named():
                    job.finish()
        except PacelineError as error:
            job.fail(error)


def _ready_optimizer(run: EngineRun, params: OptimizerParams) -> AnyOptimizer:
    """Return the run's optimizer, made if it has none, with room for its next step."""
    with _out_of_memory_named():
        optimizer = run.optimizer or make_optimizer(run.parameters, params)
        optimizer.reserve()
        return optimizer


@contextmanager
def _out_of_memory_named() -> Iterator[None]:
    """Turn every way in which torch reports a failed allocation into OutOfMemory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        raise OutOfMemory("the engine ran out of memory; send fewer or shorter sequences.") from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)

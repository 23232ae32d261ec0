"""The engine: one frozen base model with an adapter for each LoRA run, and a model for each full-parameter run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch

from paceline.errors import InvalidArgument, NoGradient, NonFiniteGradient, RunNotFound, Unsupported
from paceline.types import (
    Datum,
    ForwardBackwardSpec,
    LoraConfig,
    ModelInfo,
    OptimizerParams,
    RunParameters,
)
from trainer_service.engine.certificate.certified_base import load_certified_base
from trainer_service.engine.certificate.stock import context_length
from trainer_service.engine.distributed.ranks import Ranks, convert_memory_errors
from trainer_service.engine.microbatch.job import ForwardBackwardJob
from trainer_service.engine.microbatch.passes import PassExecutor
from trainer_service.engine.optimizers.base import AnyOptimizer, gradient_norm
from trainer_service.engine.optimizers.make import check_same
from trainer_service.engine.runs import lora_run, state_files
from trainer_service.engine.runs.async_save import AsyncSave, StagingMemory
from trainer_service.engine.runs.full_run import FullRun, full_run_bytes, make_full_run
from trainer_service.engine.runs.lora_run import LoraRun
from trainer_service.engine.runs.offload import make_offloader
from trainer_service.engine.runs.preallocated_file import PreallocatedFile
from trainer_service.engine.runs.run import TRAINED_BYTES, EngineRun
from trainer_service.engine.weight_sharing import publish_in_place
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.protocol import AccumulatedOutput, AdapterInfo, LoadedState, PublishedAs, SteppedOutput

_WEIGHT_BYTES = 4
"""Size of an adapter's weight, in float32."""


class PeftEngine:
    """Trains many runs on one device; LoRA runs share one base model. Implements `TrainerEngine`."""

    def __init__(self, options: EngineOptions, ranks: Ranks | None = None) -> None:
        """Load the base model, sharded over `ranks`, which all do the same; without `ranks`, in this process only."""
        self._ranks = ranks or Ranks.alone()
        self._options = options
        self._device = torch.device(self._ranks.claim_device(options.device))
        self.runs: dict[str, EngineRun] = {}
        """The runs in the engine, by id."""
        self._staging = StagingMemory(options.staging_bytes, pinned=self._device.type == "cuda")
        self._preallocated = PreallocatedFile()
        self._publishing: set[str] = set()
        """LoRA runs that have published."""
        self._jobs: list[ForwardBackwardJob] = []
        base = load_certified_base(options, self._ranks, self._device)
        self.model = base.sharded.model
        """The base model with the adapters of all LoRA runs."""
        self._mode, self._certificate = base.mode, base.certificate
        self._base_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._offloader = make_offloader(options, self._ranks)
        self._executor = PassExecutor(
            base.sharded, base.routing, base.mode, options, self._ranks, self._offloader, self._device
        )

    @property
    def held_bytes(self) -> int:
        """Bytes in memory of the runs' weights, gradients and optimizer states."""
        return sum(run.held_bytes for run in self.runs.values())

    @property
    def is_busy(self) -> bool:
        """Whether a job waits for a pass."""
        return bool(self._jobs)

    def load_run(self, run_id: str) -> EngineRun:
        """Return a run after loading it into memory if it is offloaded to disk; all ranks call this together.

        Raises RunNotFound, OutOfMemory, DiskFull.
        """
        run = self._run(run_id)
        self._executor.load_runs([run])
        return run

    def describe(self) -> ModelInfo:
        config = self.model.config.get_text_config(decoder=True)
        return ModelInfo(
            name=self._options.model_name,
            max_context_length=context_length(config),
            vocab_size=config.vocab_size,
            dtype=self._options.dtype,
            max_lora_rank=self._options.max_lora_rank,
            num_layers=config.num_hidden_layers,
            certificate=self._certificate,
        )

    def create_run(self, run_id: str, parameters: RunParameters) -> AdapterInfo:
        if run_id in self.runs:
            raise InvalidArgument("a run with this id already exists.", field="run_id")
        if not isinstance(parameters, LoraConfig) and self._ranks.size > 1:
            raise Unsupported("full-parameter runs need a single rank.", field="ranks")
        with convert_memory_errors():
            if isinstance(parameters, LoraConfig):
                run: EngineRun = self._make_lora_run(run_id, parameters)
            else:
                self._offloader.free_memory(full_run_bytes(parameters, self._options, self._base_parameters))
                run = make_full_run(run_id, parameters, self._options, self._mode, self.model)
        self.runs[run_id] = run
        self._offloader.add(run)
        count = sum(weight.numel() for weight in run.weights.values())
        return AdapterInfo(count, tuple(lora_run.adapted_modules(self.model, run_id)))

    def delete_run(self, run_id: str) -> None:
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        self._offloader.forget(run)
        self._executor.scheduler.forget(run_id)
        if run_id in self._publishing:
            self._publishing.remove(run_id)
            self._preallocated.drop()
        if isinstance(run, LoraRun):
            lora_run.remove_adapter(self.model, run_id)

    def begin(
        self, run_id: str, data: Sequence[Datum], spec: ForwardBackwardSpec, *, alone: bool = False
    ) -> ForwardBackwardJob:
        run = self._run(run_id)
        job = ForwardBackwardJob(run, data, spec, alone=alone or isinstance(run, FullRun))
        self._jobs.append(job)
        return job

    def advance(self, announce: Callable[[Sequence[str]], None]) -> list[ForwardBackwardJob]:
        done = self._executor.advance(self._jobs, announce)
        self._jobs = [job for job in self._jobs if job.waiting]
        return done

    def forward_backward(
        self,
        run_id: str,
        data: Sequence[Datum],
        spec: ForwardBackwardSpec,
    ) -> AccumulatedOutput:
        """Start a job and advance until it is done."""
        job = self.begin(run_id, data, spec)
        while job not in self.advance(lambda _: None):
            pass
        return job.output()

    def optim_step(self, run_id: str, params: OptimizerParams) -> SteppedOutput:
        run, start = self.load_run(run_id), time.perf_counter()
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
        run.before_change()
        with convert_memory_errors():
            learning_rate = run.take_step(optimizer, params, norm)
        run.optimizer = optimizer
        run.drop_gradient()
        run.step += 1
        milliseconds = (time.perf_counter() - start) * 1e3
        return SteppedOutput(run.step, norm, learning_rate, tokens, milliseconds, *self._memory())

    def _memory(self) -> tuple[int, int]:
        """Return the most bytes so far of the process and on its GPU."""
        gpu = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return getrusage(RUSAGE_SELF).ru_maxrss << 10, gpu

    def discard_gradient(self, run_id: str) -> int:
        run = self.load_run(run_id)
        tokens = run.pending_tokens
        run.drop_gradient()
        return tokens

    def capture_state(self, run_id: str) -> AsyncSave:
        return state_files.capture(self._resident_on_this_rank(run_id), self._staging)

    def capture_adapter(self, run_id: str, published: PublishedAs | None = None) -> AsyncSave:
        run = self._resident_on_this_rank(run_id)
        dtype = getattr(torch, self._options.adapter_dtype or self._options.dtype)
        if self._options.base_dir and published is not None and isinstance(run, FullRun):
            publish_in_place(Path(self._options.base_dir), self._device, run.weights, published)
        # Only published adapters are staged in memory: whole models and checkpoints go to the volume.
        preallocated = None
        if published is not None and isinstance(run, LoraRun):
            preallocated = self._preallocated
            self._publishing.add(run_id)
        return run.capture(run.export(dtype), self._staging, preallocated)

    def save_state(self, run_id: str, directory: Path) -> None:
        self.capture_state(run_id).write(directory)

    def save_adapter(self, run_id: str, directory: Path) -> None:
        self.capture_adapter(run_id).write(directory)

    def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        run = self.load_run(run_id)
        if with_optimizer:
            with convert_memory_errors():
                state_files.load(run, directory)
        else:
            run.set_weights(run.read_weights(directory, exact=False))
            run.reset(self._device)
        return LoadedState(run.step, run.pending_tokens)

    def _run(self, run_id: str) -> EngineRun:
        if run_id not in self.runs:
            raise RunNotFound("the engine has no run with this id; create it first.", field="run_id")
        return self.runs[run_id]

    def _resident_on_this_rank(self, run_id: str) -> EngineRun:
        """Return a run after loading it into memory on this rank only, which is enough for commands that only read."""
        run = self._run(run_id)
        self._executor.load_on_this_rank([run])
        return run

    def _make_lora_run(self, run_id: str, lora: LoraConfig) -> LoraRun:
        targets = lora_run.target_modules(self.model, lora)
        count = lora_run.count_parameters(self.model, lora, targets)
        self._offloader.free_memory((_WEIGHT_BYTES + TRAINED_BYTES) * count)
        base_model = self._options.base_reference
        return lora_run.make_lora_run(self.model, run_id, lora, targets, base_model, self._device)


def _ready_optimizer(run: EngineRun, params: OptimizerParams) -> AnyOptimizer:
    """Return the run's optimizer, created if it has none, with memory reserved for its next step."""
    with convert_memory_errors():
        optimizer = run.optimizer or run.make_optimizer(params)
        optimizer.reserve()
        return optimizer

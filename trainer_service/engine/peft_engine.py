"""The engine: one frozen base model with a PEFT adapter for each LoRA run, and a model for each full-parameter run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from peft.functional import set_adapter
from torch import Tensor
from transformers import PreTrainedModel

from paceline.errors import InvalidArgument, NoGradient, NonFiniteGradient, OutOfMemory, RunNotFound
from paceline.types import (
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInfo,
    OptimizerParams,
    OptimStepOutput,
    Reduction,
    RunParameters,
)
from trainer_service.engine import adapters, state
from trainer_service.engine.base import AdapterInfo, LoadedState
from trainer_service.engine.base_model import backbone, load_base_model, output_head
from trainer_service.engine.full_parameters import FullRun, full_run_bytes, make_full_run
from trainer_service.engine.logprobs import target_logprobs
from trainer_service.engine.lora_run import LoraRun
from trainer_service.engine.loss_specs import LossSpec, loss_spec
from trainer_service.engine.losses import LOSSES, TokenLoss
from trainer_service.engine.optimizers.gradients import gradient_norm
from trainer_service.engine.optimizers.make import check_same
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.packing import Pack, datum_weights, make_packs, scatter_logprobs
from trainer_service.engine.paging import Pager
from trainer_service.engine.run import TRAINED_BYTES, EngineRun, seeded_rng_state

_WEIGHT_BYTES = 4
"""Of an adapter's weight, in float32."""


class PeftEngine:
    """Trains many runs on one device, those with adapters on one base model. Implements `TrainerEngine`."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._device = torch.device(options.device)
        self._model = load_base_model(options)
        self._base_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._runs: dict[str, EngineRun] = {}
        self._pager = Pager(options.run_memory_bytes, Path(options.scratch_dir))

    @property
    def held_bytes(self) -> int:
        """Bytes of the runs' weights, gradients and optimizer states that are in memory."""
        return sum(run.held_bytes for run in self._runs.values())

    def bring_in(self, run_id: str) -> None:
        """Page a run in, if it waits on disk. Raises RunNotFound, OutOfMemory, DiskFull."""
        self._run(run_id)

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

    def create_run(self, run_id: str, parameters: RunParameters) -> AdapterInfo:
        if run_id in self._runs:
            raise InvalidArgument("a run of this id exists.", field="run_id")
        with _out_of_memory_named():
            if isinstance(parameters, LoraConfig):
                run: EngineRun = self._make_lora_run(run_id, parameters)
            else:
                self._pager.make_room(full_run_bytes(parameters, self._options, self._base_parameters))
                run = make_full_run(run_id, parameters, self._options)
        self._runs[run_id] = run
        self._pager.add(run)
        return AdapterInfo(sum(weight.numel() for weight in run.weights.values()))

    def delete_run(self, run_id: str) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            self._pager.forget(run)
        if isinstance(run, LoraRun):
            adapters.remove_adapter(self._model, run_id)

    def forward_backward(
        self,
        run_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float],
        *,
        forward_only: bool,
        reduction: Reduction = Reduction.SUM,
        reduction_count: int | None = None,
    ) -> ForwardBackwardOutput:
        run, spec = self._run(run_id), loss_spec(loss_fn)
        config = spec.resolve_config(loss_fn_config)
        model = self._model_of(run)
        outputs = [np.full(datum.loss_inputs["target_tokens"].shape, np.nan, np.float32) for datum in data]
        totals = _Totals()
        weights = datum_weights(data, reduction, reduction_count)
        with _out_of_memory_named(), nullcontext() if forward_only else self._gradient(run):
            for pack in self._packs(data, weights, spec, config):
                logprobs, token_loss = self._pack_loss(model, pack, loss_fn, config, forward_only=forward_only)
                scatter_logprobs(outputs, pack, logprobs.cpu().numpy())
                totals.add(token_loss)
        if not forward_only:
            run.has_gradient = True
            run.pending_tokens += totals.tokens
        return ForwardBackwardOutput([{"logprobs": values} for values in outputs], totals.metrics())

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
        with _out_of_memory_named(), run.drawing(self._device):
            optimizer = run.optimizer or run.make_optimizer(params)
            learning_rate = run.take_step(optimizer, params, norm)
        run.optimizer = optimizer
        run.drop_gradient()
        run.step += 1
        milliseconds = (time.perf_counter() - start) * 1e3
        return OptimStepOutput(run.step, norm, learning_rate, tokens, milliseconds)

    def save_state(self, run_id: str, directory: Path) -> None:
        state.save(self._run(run_id), directory, self._options.model_name)

    def save_adapter(self, run_id: str, directory: Path) -> None:
        dtype = getattr(torch, self._options.adapter_dtype or self._options.dtype)
        self._run(run_id).export(directory, self._options.model_name, dtype)

    def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        run = self._run(run_id)
        if with_optimizer:
            state.load(run, directory)
        else:
            run.set_weights(run.read_weights(directory, exact=False))
            run.reset(self._device)
        return LoadedState(run.step)

    def _run(self, run_id: str) -> EngineRun:
        if run_id not in self._runs:
            raise RunNotFound("the engine holds no such run; create it first.", field="run_id")
        run = self._runs[run_id]
        with _out_of_memory_named():
            self._pager.use(run)
        return run

    @contextmanager
    def _gradient(self, run: EngineRun) -> Iterator[None]:
        with run.accumulate(), run.training(self._device):
            yield

    def _make_lora_run(self, run_id: str, lora: LoraConfig) -> LoraRun:
        targets = adapters.target_modules(self._model, lora)
        count = adapters.count_parameters(self._model, lora, targets)
        self._pager.make_room((_WEIGHT_BYTES + TRAINED_BYTES) * count)
        adapters.add_adapter(self._model, run_id, lora, targets)
        return LoraRun(
            run_id=run_id,
            lora=lora,
            targets=targets,
            parameters=adapters.adapter_parameters(self._model, run_id),
            dropouts=[layer.lora_dropout[run_id] for _, layer in adapters.layers_of(self._model, run_id)],
            rng_state=seeded_rng_state(lora.seed, self._device),
        )

    def _model_of(self, run: EngineRun) -> PreTrainedModel:
        """Return the model that computes a run: its own, or the shared one with the run's adapter active."""
        if isinstance(run, FullRun):
            return run.model
        set_adapter(self._model, run.run_id)
        return self._model

    def _packs(
        self, data: Sequence[Datum], weights: Sequence[float], spec: LossSpec, config: Mapping[str, float]
    ) -> list[Pack]:
        names, fills = spec.required_inputs(config), spec.fills(config)
        return make_packs(data, names, self._options.pack_tokens, self._device, fills=fills, weights=weights)

    def _pack_loss(
        self, model: PreTrainedModel, pack: Pack, loss_fn: str, config: Mapping[str, float], *, forward_only: bool
    ) -> tuple[Tensor, TokenLoss]:
        """Return logprobs and weighted loss at the counted positions, detached; add to the gradient if there is one."""
        with torch.set_grad_enabled(not forward_only):
            logprobs = self._logprobs(model, pack)
            result = LOSSES[loss_fn](logprobs, pack.loss_inputs, config)
            loss = result.loss * pack.weights
        if not forward_only:
            torch.autograd.backward(loss.sum())
        return logprobs.detach(), TokenLoss(loss.detach(), result.means)

    def _logprobs(self, model: PreTrainedModel, pack: Pack) -> Tensor:
        hidden = backbone(model)(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            segment_lengths=pack.segment_lengths,
        ).last_hidden_state[0]
        targets = pack.loss_inputs["target_tokens"]
        counted = hidden.index_select(0, pack.counted)
        return target_logprobs(output_head(model), counted, targets, self._options.logprob_chunk)


class _Totals:
    """Sums over the packs of one request."""

    def __init__(self) -> None:
        self.tokens = 0
        self._loss = 0.0
        self._sums: dict[str, float] = {}

    def add(self, token_loss: TokenLoss) -> None:
        self.tokens += token_loss.loss.numel()
        self._loss += token_loss.loss.double().sum().item()
        for name, values in token_loss.means.items():
            self._sums[name] = self._sums.get(name, 0.0) + values.double().sum().item()

    def metrics(self) -> dict[str, float]:
        """Named name:reduction. Means over no tokens are left out."""
        means = {f"{name}:mean": total / self.tokens for name, total in self._sums.items()}
        return {"loss:sum": self._loss, "tokens:sum": float(self.tokens), **means}


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

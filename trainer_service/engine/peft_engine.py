"""The engine for LoRA runs: one frozen base model, one PEFT adapter for each run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from peft.functional import set_adapter
from torch import Tensor

from paceline.errors import InvalidArgument, NoGradient, NonFiniteGradient, OutOfMemory, RunNotFound
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
from trainer_service.engine.base_model import backbone, load_base_model, output_head
from trainer_service.engine.captures import Capture, StagingMemory
from trainer_service.engine.logprobs import target_logprobs
from trainer_service.engine.loss_specs import LossSpec, loss_spec
from trainer_service.engine.losses import LOSSES, TokenLoss
from trainer_service.engine.optimizers.gradients import gradient_norm
from trainer_service.engine.optimizers.make import check_same, make_optimizer
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.packing import Pack, datum_weights, make_packs, scatter_logprobs
from trainer_service.engine.run import EngineRun, seeded_rng_state


class PeftEngine:
    """Trains many LoRA runs on one base model, on one device. Implements `TrainerEngine`."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._device = torch.device(options.device)
        self._model = load_base_model(options)
        self._runs: dict[str, EngineRun] = {}
        self._staging = StagingMemory(options.staging_bytes, pinned=self._device.type == "cuda")

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
            dropouts=[layer.lora_dropout[run_id] for _, layer in adapters.layers_of(self._model, run_id)],
            rng_state=seeded_rng_state(lora.seed, self._device),
        )
        return AdapterInfo(sum(parameter.numel() for parameter in parameters.values()))

    def delete_run(self, run_id: str) -> None:
        if self._runs.pop(run_id, None) is not None:
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
        set_adapter(self._model, run_id)
        outputs = [np.full(datum.loss_inputs["target_tokens"].shape, np.nan, np.float32) for datum in data]
        totals = _Totals()
        weights = datum_weights(data, reduction, reduction_count)
        with _out_of_memory_named(), nullcontext() if forward_only else self._gradient(run):
            for pack in self._packs(data, weights, spec, config):
                logprobs, token_loss = self._pack_loss(pack, loss_fn, config, forward_only=forward_only)
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
        run.before_change()
        with _out_of_memory_named():
            optimizer = run.optimizer or make_optimizer(run.parameters, params)
            learning_rate = optimizer.step(params, run.step + 1, norm)
        run.optimizer = optimizer
        run.drop_gradient()
        run.step += 1
        milliseconds = (time.perf_counter() - start) * 1e3
        return OptimStepOutput(run.step, norm, learning_rate, tokens, milliseconds)

    def capture_state(self, run_id: str) -> Capture:
        return state.capture(self._run(run_id), self._options.model_name, self._staging)

    def capture_adapter(self, run_id: str) -> Capture:
        dtype = getattr(torch, self._options.adapter_dtype or self._options.dtype)
        return state.capture_adapter(self._run(run_id), self._options.model_name, dtype, self._staging)

    def save_state(self, run_id: str, directory: Path) -> None:
        self.capture_state(run_id).write(directory)

    def save_adapter(self, run_id: str, directory: Path) -> None:
        self.capture_adapter(run_id).write(directory)

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

    @contextmanager
    def _gradient(self, run: EngineRun) -> Iterator[None]:
        with run.accumulate(), run.dropout(self._device):
            yield

    def _packs(
        self, data: Sequence[Datum], weights: Sequence[float], spec: LossSpec, config: Mapping[str, float]
    ) -> list[Pack]:
        names, fills = spec.required_inputs(config), spec.fills(config)
        return make_packs(data, names, self._options.pack_tokens, self._device, fills=fills, weights=weights)

    def _pack_loss(
        self, pack: Pack, loss_fn: str, config: Mapping[str, float], *, forward_only: bool
    ) -> tuple[Tensor, TokenLoss]:
        """Return logprobs and weighted loss at the counted positions, detached; add to the gradient if there is one."""
        with torch.set_grad_enabled(not forward_only):
            logprobs = self._logprobs(pack)
            result = LOSSES[loss_fn](logprobs, pack.loss_inputs, config)
            loss = result.loss * pack.weights
        if not forward_only:
            torch.autograd.backward(loss.sum())
        return logprobs.detach(), TokenLoss(loss.detach(), result.means)

    def _logprobs(self, pack: Pack) -> Tensor:
        hidden = backbone(self._model)(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            segment_lengths=pack.segment_lengths,
        ).last_hidden_state[0]
        targets = pack.loss_inputs["target_tokens"]
        counted = hidden.index_select(0, pack.counted)
        return target_logprobs(output_head(self._model), counted, targets, self._options.logprob_chunk)


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

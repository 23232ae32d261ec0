"""The base model that an engine serves: loaded, and run in a mode that computes what stock transformers computes.

That is measured at every load, before the model is served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.base_model.model_directory import first_line
from paceline.errors import OutOfMemory, PacelineError, Unsupported
from paceline.types import ForwardBackwardSpec, LoraConfig, ModelCertificate
from paceline.types.training import Array
from trainer_service.engine.certificate.boundaries import Lowering, find_boundaries
from trainer_service.engine.certificate.stock import (
    BEYOND,
    CONTEXT_FIELDS,
    LENGTHS,
    RANK,
    Probe,
    Stock,
    Stocks,
    Weights,
    make_probe,
    measure_stock,
    relative_difference,
    rms,
)
from trainer_service.engine.distributed.ranks import Ranks
from trainer_service.engine.distributed.sharding import ShardedModel
from trainer_service.engine.microbatch.job import ForwardBackwardJob
from trainer_service.engine.microbatch.passes import PassExecutor
from trainer_service.engine.model.base_model import (
    STOCK_ATTENTION,
    PassMode,
    hidden_states,
    length_dependent_rope,
    load_base_model,
    modes_of,
    output_head,
    use_attention,
)
from trainer_service.engine.model.diagnosis import why_different, why_failed
from trainer_service.engine.model.fused_layers import has_fused_family
from trainer_service.engine.model.lora_linear import Routing
from trainer_service.engine.model.module_groups import adaptable_modules, groups_of
from trainer_service.engine.model.packed_attention import VARIANT
from trainer_service.engine.runs import lora_run
from trainer_service.engine.runs.lora_run import LoraRun
from trainer_service.engine.runs.offload import RunOffloader
from trainer_service.engine_link import messages
from trainer_service.engine_link.options import EngineOptions

_PROBES = 4
"""Most times that tokens are drawn."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CertifiedBase:
    """A base model, the routing of runs' rows through its adapters, and the mode of its passes."""

    sharded: ShardedModel
    routing: Routing
    mode: PassMode
    certificate: ModelCertificate


def load_certified_base(options: EngineOptions, ranks: Ranks, device: torch.device) -> CertifiedBase:
    """Load the base model and find the fastest mode in which it computes what stock transformers computes.

    All ranks call this together. Raises Unsupported, with a sentence that names a module, if there is none, and
    whatever `load_base_model` raises.
    """
    return UncertifiedBase(options, ranks, device).certified()


class InconclusiveError(Exception):
    """A few tokens differ; only other tokens can show whether that is chance."""


class UncertifiedBase:
    """A base model that is not certified yet."""

    _sharded: ShardedModel
    _routing: Routing
    _executor: PassExecutor
    _offloader: RunOffloader
    _probe: Probe
    _probe_beyond: Probe
    _lowering: Lowering | None
    """How to lower the lengths from which the model computes something else, where the probe is shorter."""
    _rope = ""
    """Module whose rotary frequencies depend on the longest sequence of a pass."""
    _variant = ""
    """What the model adds to attention that only its own implementation computes."""

    def __init__(self, options: EngineOptions, ranks: Ranks, device: torch.device) -> None:
        self.options, self.ranks, self.device = options, ranks, device
        self._stocks: Stocks | None = None
        self.seed = 0
        """Seed of the tokens."""
        self._seconds = 0.0
        """Time spent on the check so far."""

    def certified(self) -> CertifiedBase:
        """Load and check the model; check it again on other tokens if only a few differ."""
        while True:
            self._load(fused=True)
            # Rank 0 has measured this; all ranks compare with its numbers.
            stocks = messages.decode(self.ranks.share(messages.encode(self._stocks)), Stocks)
            start = time.perf_counter()
            try:
                verdict = self.certify(stocks)
            except InconclusiveError:
                self.seed, self._stocks = self.seed + 1, None
            else:
                self._seconds += time.perf_counter() - start
                return self._certified(verdict, stocks)

    def certify(self, stocks: Stocks) -> _Verdict:
        """Switch to the first mode in which the model computes what stock transformers computes.

        Raises Unsupported, with a sentence that names a module, if there is none. Unless this is the last probe, raises
        InconclusiveError if a mode may have failed by chance.
        """
        name, reason, packing = self.options.model_name, "", ""
        for mode in modes_of(self._model):
            stock: Stock | None = stocks.within
            within, reason = self._try(mode, stocks.within)
            differences = within
            if not reason and self._lowering is not None:
                stock = stocks.beyond
                differences, reason = self._try_beyond(mode, stocks, self._lowering)
            if within is not None and not reason:
                return _Verdict(mode, within, "" if mode.is_packed else packing)
            _log.info("%s cannot run in mode %s: %s (%s).", name, mode, reason, differences or "no results")
            # The next mode is slower. One with few deviations gets another probe before it is given up for that one.
            may_be_chance = differences is not None and stock is not None and differences.only_few_differ(stock)
            if may_be_chance and self.seed < _PROBES - 1:
                raise InconclusiveError
            if mode.is_packed:
                packing = f"{reason}."
        raise Unsupported(f"{name} cannot be served: {reason}.")

    def _try(self, mode: PassMode, stock: Stock) -> tuple[_Differences | None, str]:
        """Return how far a mode is from stock transformers (None without results), and why it is rejected, if it is."""
        try:
            self.use(mode)
            if mode.is_packed and self._mixes(mode):
                return None, self._explain(mode, None)
            differences = _Differences.between(self._compute(stock), stock)
        except OutOfMemory:
            raise  # The machine's fault, not the mode's.
        except Exception as error:
            return None, self._explain(mode, error)
        return differences, "" if differences.within(stock) else self._explain(mode, None)

    def _try_beyond(self, mode: PassMode, stocks: Stocks, lowering: Lowering) -> tuple[_Differences | None, str]:
        """Try a mode beyond the model's boundaries. What cannot be checked is not packed."""
        if stocks.beyond is None:
            if mode.is_packed:
                return None, f"what begins beyond {lowering.names} cannot be checked: {stocks.unchecked}"
            return None, ""
        with self._beyond(lowering, self._model):
            differences, reason = self._try(mode, stocks.beyond)
        return differences, f"{reason} (for sequences beyond {lowering.names})" if reason else ""

    @contextmanager
    def _beyond(self, lowering: Lowering, model: PreTrainedModel) -> Iterator[None]:
        """Lower the model's boundaries and take the probe for that, until the block ends."""
        within, self._probe = self._probe, self._probe_beyond
        try:
            with lowering.applied(model):
                yield
        finally:
            self._probe = within

    def _certified(self, verdict: _Verdict, stocks: Stocks) -> CertifiedBase:
        mode, differences, stock = verdict.mode, verdict.differences, stocks.within
        certificate = ModelCertificate(
            packing=mode.packing,
            attention=mode.attention,
            reason=verdict.reason,
            tokens=stocks.tokens,
            logprob_difference=differences.logprob,
            logprob_bound=stock.logprob_bound,
            gradient_difference=differences.gradient,
            gradient_bound=stock.gradient_bound,
            seconds=self._seconds,
            groups=groups_of(self._model),
        )
        _log.info(
            "%s is certified: %s; %s; bounds %.2g and %.2g; %.2f s. %s",
            self.options.model_name,
            mode,
            differences,
            stock.logprob_bound,
            stock.gradient_bound,
            certificate.seconds,
            verdict.reason,
        )
        self._sharded.names_modules = False  # Later errors are those of commands.
        return CertifiedBase(self._sharded, self._routing, mode, certificate)

    @property
    def _model(self) -> PreTrainedModel:
        return self._sharded.model

    def use(self, mode: PassMode) -> None:
        """Switch to a mode for all later passes. Raises Unsupported if the model does not support it."""
        if self._fused and not mode.fused:
            self._load(fused=False)
        if mode.is_packed and self._rope:
            raise Unsupported(f"{self._rope} depends on the longest sequence of a pass.")
        if mode.attention != STOCK_ATTENTION and self._variant:
            raise Unsupported(f"attention {mode.attention} does not compute {self._variant}.")
        use_attention(self._model, mode.attention)
        self._sharded.rehearse(mode)
        self._offloader = RunOffloader(None, Path())
        tokens = sum(len(datum.model_input) for data in self._probe.values() for datum in data)
        options = replace(self.options, pack_tokens=tokens, joint_passes=True)
        self._executor = PassExecutor(
            self._sharded, self._routing, mode, options, self.ranks, self._offloader, self.device
        )
        self._packed, self._mixed = mode.is_packed, False

    def _mixes(self, mode: PassMode) -> bool:
        """Return whether a sequence depends on earlier sequences in its pass.

        Differentiates a sequence by an earlier one: if independent, the result is exactly 0, in every dtype.
        """
        data = next(iter(self._probe.values()))
        tokens = torch.from_numpy(data[-1].model_input.astype(np.int64)).to(self.device)
        lengths = (len(tokens) // 2, len(tokens) - len(tokens) // 2)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)[None]
        entered: list[Tensor] = []

        def enter(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
            entered.append(out if out.requires_grad else out.requires_grad_())
            return entered[-1]

        def derive() -> bool:
            hidden = self._sharded.run_root(lambda: hidden_states(self._model, mode, tokens[None], positions, lengths))
            own = hidden[:, lengths[0] :].float()
            # A plain sum would not do: norms keep it constant.
            (slope,) = torch.autograd.grad((own * torch.arange(own.shape[-1], device=own.device).sin()).sum(), entered)
            return bool((slope[:, : lengths[0]] != 0).any())

        handle = self._model.get_input_embeddings().register_forward_hook(enter)
        try:
            self._mixed = bool(self._sharded.run(derive, with_gradient=True))
            return self._mixed
        finally:
            handle.remove()

    def _compute(self, stock: Stock) -> _ProbeResults:
        """Compute the probe that `stock` was measured with, using the adapters in `stock`."""
        runs: dict[str, LoraRun] = {}
        try:
            for run_id, weights in stock.adapters.items():
                runs[run_id] = self._make_run(run_id, weights)
            spec = ForwardBackwardSpec("cross_entropy")
            jobs = [ForwardBackwardJob(run, self._probe[run_id], spec) for run_id, run in runs.items()]
            passes: list[Sequence[str]] = []
            logprobs = self._logprobs(jobs, passes.append)
            if self._packed and len(passes) > 1:
                raise Unsupported("a pass that two runs share fails.")
            first, data = next(iter(runs.values())), next(iter(self._probe.values()))
            job = ForwardBackwardJob(first, data[-1:], replace(spec, forward_only=True))
            ((alone,),) = self._logprobs([job], lambda _: None)
            gradients = {
                run_id: {name: _array(parameter.grad) for name, parameter in run.parameters.items()}
                for run_id, run in runs.items()
            }
            return _ProbeResults(dict(zip(runs, logprobs, strict=True)), gradients, alone)
        finally:
            for run_id in runs:
                lora_run.remove_adapter(self._model, run_id)

    def _explain(self, mode: PassMode, error: Exception | None) -> str:
        """Say in a sentence what a mode gets wrong, and in which module. `error` is what it raised, if anything."""
        if isinstance(error, PacelineError):
            self._variant = error.metadata.get(VARIANT, "") or self._variant
        if error is not None:
            return why_failed(error, self._model)
        if mode.fused:
            return "the fused layers give different results from transformers"
        tokens = np.concatenate([datum.model_input for data in self._probe.values() for datum in data])
        device_tokens = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        return why_different(self._model, mode, device_tokens, self._pass, mixes=self._mixed)

    def _pass(self, work: Callable[[], object]) -> object:
        """Run a pass without gradients; all ranks run the same one."""
        return self._sharded.run(lambda: self._sharded.run_root(work), with_gradient=False)

    def _load(self, *, fused: bool) -> None:
        for name in ("_sharded", "_executor"):  # They hold the previously loaded model.
            self.__dict__.pop(name, None)
        self._sharded = ShardedModel(
            lambda: load_base_model(self.options, fused=fused, examine=self._examine), self.ranks, self.device
        )
        self._sharded.names_modules = True
        self._fused = fused and has_fused_family(self._model)
        try:
            self._routing = lora_run.adapt(self._model)
        except ValueError as error:
            reason = f"PEFT cannot add an adapter to it: {first_line(error).rstrip('(')}"
            raise Unsupported(f"{self.options.model_name} cannot be served: {reason}.") from error

    def _examine(self, model: PreTrainedModel) -> None:
        start = time.perf_counter()
        self._probe = make_probe(model.config, self.seed, LENGTHS)
        self._probe_beyond = make_probe(model.config, self.seed, BEYOND)
        self._rope = length_dependent_rope(model)
        longest = max(len(datum.model_input) for data in self._probe.values() for datum in data)
        self._lowering = find_boundaries(model, longest, CONTEXT_FIELDS)
        if self.ranks.leads and self._stocks is None:
            try:
                self._stocks = self.measure(model)
            except OutOfMemory:
                raise
            except Exception as error:
                raise Unsupported(f"{self.options.model_name} cannot be served: {why_failed(error, model)}.") from error
        self._seconds += time.perf_counter() - start

    def measure(self, model: PreTrainedModel) -> Stocks:
        within = self._measure_probe(model)
        if not adaptable_modules(model):
            raise Unsupported(f"{type(model).__name__} has no linear layer that can have an adapter.")
        if self._lowering is None:
            return Stocks(within)
        try:
            with self._beyond(self._lowering, model):
                return Stocks(within, self._measure_probe(model, within))
        except OutOfMemory:
            raise
        except Exception as error:
            return Stocks(within, unchecked=why_failed(error, model))

    def _measure_probe(self, model: PreTrainedModel, known: Stock | None = None) -> Stock:
        modules, head = adaptable_modules(model), output_head(model)
        without_head = [name for name in modules if model.get_submodule(name) is not head]
        # One run trains the head and one does not: the engine computes a frozen head in another way.
        targets = dict(zip(self._probe, (modules, without_head or modules), strict=True))
        return measure_stock(model, targets, self._probe, known)

    def _make_run(self, run_id: str, weights: Weights) -> LoraRun:
        modules = tuple(
            dict.fromkeys(name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in weights)
        )
        lora = LoraConfig(rank=RANK, alpha=RANK, target_modules=modules)
        targets = lora_run.target_modules(self._model, lora)
        run = lora_run.make_lora_run(self._model, run_id, lora, targets, "", self.device)
        self._offloader.add(run)
        run.set_weights({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
        return run

    def _logprobs(
        self, jobs: Sequence[ForwardBackwardJob], announce: Callable[[Sequence[str]], None]
    ) -> list[list[Array]]:
        """Run passes until all jobs are done; return their log-probabilities. Raises the error of a job that failed."""
        waiting = jobs
        while waiting:
            self._executor.advance(waiting, announce)
            waiting = [job for job in waiting if job.waiting]
        return [[output["logprobs"] for output in job.output().loss_fn_outputs] for job in jobs]


@dataclass(frozen=True, slots=True)
class _ProbeResults:
    """What the engine computes for a probe."""

    logprobs: dict[str, list[Array]]
    """Run -> log-probabilities of each sequence, computed alongside the other run's."""
    gradients: dict[str, Weights]
    alone: Array
    """Log-probabilities of the first run's last sequence, computed on its own and without gradients."""


@dataclass(frozen=True, slots=True)
class _Differences:
    """How far results differ from those of stock transformers."""

    logprob: float
    gradient: float
    typical: float
    """Median absolute difference between log-probabilities."""

    @classmethod
    def between(cls, results: _ProbeResults, stock: Stock) -> _Differences:
        """Compare all log-probabilities and gradients."""
        off = [results.alone - next(iter(stock.logprobs.values()))[-1]]
        for run, sequences in stock.logprobs.items():
            off += [own - theirs for own, theirs in zip(results.logprobs[run], sequences, strict=True)]
        names = [(run, name) for run, weights in stock.gradients.items() for name in weights]
        theirs = [stock.gradients[run][name] for run, name in names]
        gradient = relative_difference(theirs, [results.gradients[run][name] for run, name in names])
        return cls(rms(*off), gradient, float(np.median(np.abs(np.concatenate(off)))))

    def within(self, stock: Stock) -> bool:
        """Return whether rounding explains the differences. It never explains NaN."""
        return self.logprob <= stock.logprob_bound and self.gradient <= stock.gradient_bound

    def only_few_differ(self, stock: Stock) -> bool:
        """Return whether most tokens match and a few do not, as happens when rounding selects another expert."""
        return not self.within(stock) and self.typical <= stock.logprob_bound

    def __str__(self) -> str:
        return f"log-probabilities differ by {self.logprob:.2g}, gradients by {self.gradient:.2g}"


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The mode that a model was certified in."""

    mode: PassMode
    differences: _Differences
    reason: str
    """Why sequences do not share passes; empty if they do."""


def _array(gradient: Tensor | None) -> Array:
    assert gradient is not None  # noqa: S101 - add_gradient gives every parameter one
    return gradient.cpu().numpy()

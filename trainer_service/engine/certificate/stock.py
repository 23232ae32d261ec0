"""The probe of the startup check, what stock transformers computes for it, and how far rounding moves that.

The probe is random sequences of two runs. Stock transformers computes them one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from paceline.errors import Unsupported
from paceline.types import Datum
from paceline.types.training import Array

LENGTHS = {"certificate-1": (72, 16), "certificate-2": (31, 7)}
"""Run -> tokens in each of its sequences. Few, because each costs time at every start; short and long, because short
ones fill no block and long ones exceed the windows of small models."""

BEYOND = {"certificate-1": (40, 12), "certificate-2": (20,)}
"""The same for the check beyond a model's boundaries, once these are lowered to `boundaries.LOWERED` tokens. Most
tokens must be beyond, because a few that differ are taken for chance."""

Probe = dict[str, list[Datum]]
"""Run -> its sequences."""

RANK = 2
"""Rank and alpha of the adapters that the check puts on every module that can have one."""

_SHARE = 0.2
"""Size of what an adapter adds to a module's weight, relative to the weight."""
_ROUNDED = (1,)
"""Indices of the sequences whose rounding is measured; long ones would cost more and show the same."""
_ROUNDINGS = {torch.float32: 8.0}
"""dtype -> roundings by which a module's output is perturbed; one for other dtypes. Sums are computed in float32: those
of a float32 model are rounded at every step, those of other models once, at the end."""
_SLACK = 2.0
"""Two ways to compute the same thing may differ by this many times the measured rounding."""
_OTHER_SLACK = 4.0
"""Bounds for one probe hold for another with this factor; a wrong mask changes results by far more."""
_SUMS = 64.0
"""float32 roundings that are always allowed: rounding within sums, whose order differs, is not measured."""

_UNLIMITED = 1 << 20
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
"""Fields of configurations that are the length of the longest sequence."""

Weights = dict[str, Array]
"""An adapter's weights or their gradients, float32, by their names in adapter_model.safetensors."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What stock transformers computes for a probe, and how far rounding may move it."""

    adapters: dict[str, Weights]
    """Run -> its adapter."""
    logprobs: dict[str, list[Array]]
    """Run -> log-probabilities of each sequence, float32."""
    gradients: dict[str, Weights]
    """Run -> gradients of its cross entropy."""
    logprob_bound: float
    """Bound on the root mean square of differences between log-probabilities."""
    gradient_bound: float
    """Bound on the norm of the difference between gradients, relative to the norm of the gradient."""


@dataclass(frozen=True, slots=True)
class Stocks:
    """What stock transformers computes within a model's boundaries, and beyond them."""

    within: Stock
    beyond: Stock | None = None
    """None if the probe lies beyond all boundaries already, or if `unchecked`."""
    unchecked: str = ""
    """Why stock transformers computes nothing beyond the boundaries once they are lowered."""

    @property
    def tokens(self) -> int:
        """Number of tokens compared."""
        found = [self.within] if self.beyond is None else [self.within, self.beyond]
        return sum(len(own) for stock in found for run in stock.logprobs.values() for own in run)


@dataclass(frozen=True, slots=True)
class _SequenceResults:
    """Results of one sequence."""

    logprobs: Array
    gradients: list[Array]
    """Gradients of A and B, module by module."""


def make_probe(config: PretrainedConfig, seed: int, sequences: Mapping[str, Sequence[int]]) -> Probe:
    """Draw sequences of these lengths that a model of `config` accepts, without its special tokens."""
    generator, text = np.random.default_rng(seed), config.get_text_config(decoder=True)
    usual = np.setdiff1d(np.arange(text.vocab_size), sorted(_special(config) | _special(text)))
    longest = context_length(config)
    return {
        run: [_draw_datum(generator, min(n, longest), usual) for n in lengths] for run, lengths in sequences.items()
    }


def context_length(config: PretrainedConfig) -> int:
    """Return the length of the longest sequence in tokens; 2^20 for models without a limit."""
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, field, None) for field in CONTEXT_FIELDS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), _UNLIMITED)


def _draw_datum(generator: np.random.Generator, length: int, tokens: Array) -> Datum:
    drawn = generator.choice(tokens, length + 1)
    weights = generator.uniform(0.5, 1.5, length).astype(np.float32)
    return Datum(drawn[:-1].astype(np.int32), {"target_tokens": drawn[1:].astype(np.int64), "weights": weights})


def _special(config: Any) -> set[int]:
    """Return the token ids that the config names, such as those for padding, images and the end of a sequence."""
    values = [value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index", "_id"))]
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return {one for one in flat if isinstance(one, int)}


def measure_stock(
    model: PreTrainedModel, targets: Mapping[str, Sequence[str]], probe: Probe, known: Stock | None = None
) -> Stock:
    """Compute a probe with a model as transformers built it, with each run's adapter on the modules in `targets`.

    The bounds come from Monte Carlo arithmetic (Parker, 1997): every module's output is perturbed at random by as much
    as rounding in its dtype may change it, and the change in the results shows the effect of rounding. If `known` is
    given, that is not measured again: its bounds hold, with more slack. Raises Unsupported for models whose tokens see
    later ones, or whose numbers are not finite.
    """
    adapters = {run: _draw_adapter(model, targets[run], seed) for seed, run in enumerate(probe)}
    results: dict[str, list[_SequenceResults]] = {}
    exact: list[_SequenceResults] = []
    perturbed: list[_SequenceResults] = []
    for run, data in probe.items():
        with _adapted(model, adapters[run]) as factors:
            results[run] = [_compute(model, datum, factors) for datum in data]
            few = [number for number in _ROUNDED if number < len(data) and known is None]
            exact += [results[run][number] for number in few]
            if few:
                with _perturbed_outputs(model):
                    perturbed += [_compute(model, data[number], factors) for number in few]
    logprobs = {run: [own.logprobs for own in sequences] for run, sequences in results.items()}
    if not all(np.isfinite(own).all() for run in logprobs.values() for own in run):
        raise Unsupported(f"{type(model).__name__} gives log-probabilities that are not finite.")
    if known is None:
        bounds = _bounds(model, results, exact, perturbed)
    else:
        bounds = _OTHER_SLACK * known.logprob_bound, _OTHER_SLACK * known.gradient_bound
    stock = Stock(
        adapters,
        logprobs,
        {
            run: dict(zip(adapters[run], _sums([own.gradients for own in sequences]), strict=True))
            for run, sequences in results.items()
        },
        *bounds,
    )
    _check_causal(model, probe, stock)
    return stock


def _bounds(
    model: PreTrainedModel,
    results: Mapping[str, Sequence[_SequenceResults]],
    exact: Sequence[_SequenceResults],
    perturbed: Sequence[_SequenceResults],
) -> tuple[float, float]:
    """Return the bounds on differences of log-probabilities and gradients that rounding explains."""
    least = torch.finfo(model.dtype).eps + _SUMS * torch.finfo(torch.float32).eps
    size = rms(*(own.logprobs for sequences in results.values() for own in sequences))
    logprob_error = rms(*(a.logprobs - b.logprobs for a, b in zip(exact, perturbed, strict=True)))
    gradient_error = relative_difference(
        [g for a in exact for g in a.gradients], [g for b in perturbed for g in b.gradients]
    )
    return _SLACK * logprob_error + least * size, _SLACK * gradient_error + least


def rms(*arrays: Array) -> float:
    """Return the root mean square of all elements."""
    return math.sqrt(np.mean(np.square(np.concatenate(arrays).astype(np.float64))))


def relative_difference(ones: Sequence[Array], others: Sequence[Array]) -> float:
    """Return the norm of the difference between arrays of the same shapes, relative to the norm of `ones`."""
    norm = _norm(ones)
    off = _norm([one - other for one, other in zip(ones, others, strict=True)])
    return off / norm if norm else off


def _norm(arrays: Sequence[Array]) -> float:
    return math.sqrt(sum(float(np.square(each.astype(np.float64)).sum()) for each in arrays))


def _sums(lists: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.sum(own, axis=0) for own in zip(*lists, strict=True)]


def _draw_adapter(model: PreTrainedModel, modules: Sequence[str], seed: int) -> Weights:
    """Draw, on the CPU, A and B whose product is `_SHARE` of the size of each module's weight."""
    generator, adapter = torch.Generator().manual_seed(seed), Weights()
    for name in modules:
        linear: Any = model.get_submodule(name)
        weight = linear.weight[:64].detach().float().cpu()
        a = torch.rand(RANK, weight.shape[1], generator=generator) * 2 - 1
        b = torch.rand(linear.weight.shape[0], RANK, generator=generator) * 2 - 1
        # The product of A and B, each of variance 1/3, has variance RANK / 9.
        b *= _SHARE * weight.square().mean().sqrt() * 3 / math.sqrt(RANK)
        adapter[f"base_model.model.{name}.lora_A.weight"] = a.numpy()
        adapter[f"base_model.model.{name}.lora_B.weight"] = b.numpy()
    return adapter


@contextmanager
def _adapted(model: PreTrainedModel, adapter: Mapping[str, Array]) -> Iterator[list[Tensor]]:
    """Apply a run's adapter; yield its A and B, module by module, as tensors that require gradients."""
    factors = {name: torch.from_numpy(value).to(model.device).requires_grad_() for name, value in adapter.items()}
    handles = []
    for name, a in factors.items():
        module, _, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if kind == "lora_A":
            hook = partial(_add_product, a=a, b=factors[name.replace("lora_A", "lora_B")])
            handles.append(model.get_submodule(module).register_forward_hook(hook))
    try:
        yield list(factors.values())
    finally:
        for handle in handles:
            handle.remove()


def _add_product(_module: nn.Module, inputs: tuple[Tensor], out: Tensor, *, a: Tensor, b: Tensor) -> Tensor:
    return (out.float() + inputs[0].float() @ a.t() @ b.t()).to(out.dtype)


@contextmanager
def _perturbed_outputs(model: PreTrainedModel) -> Iterator[None]:
    """Perturb every module's output at random by up to `_ROUNDINGS` of its dtype."""
    epsilon = torch.finfo(model.dtype).eps / 2 * _ROUNDINGS.get(model.dtype, 1.0)
    generator = torch.Generator(model.device).manual_seed(0)

    def perturb(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        factor = torch.empty(value.shape, device=value.device).uniform_(-epsilon, epsilon, generator=generator).add_(1)
        return (value.float() * factor).to(value.dtype)

    def hook(_module: nn.Module, _inputs: Any, out: Any) -> Any:
        if type(out) is tuple and out:
            return (perturb(out[0]), *out[1:])
        return perturb(out)

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compute(model: PreTrainedModel, datum: Datum, factors: Sequence[Tensor]) -> _SequenceResults:
    logprobs = stock_logprobs(model, datum)
    weights = torch.from_numpy(datum.loss_fn_inputs["weights"]).to(model.device)
    loss = -(logprobs * weights).sum()
    gradients = torch.autograd.grad(loss, factors, allow_unused=True) if loss.requires_grad else ()
    given = [torch.zeros_like(f) if g is None else g for f, g in zip_longest(factors, gradients)]
    return _SequenceResults(logprobs.detach().cpu().numpy(), [each.cpu().numpy() for each in given])


def stock_logprobs(model: PreTrainedModel, datum: Datum, length: int | None = None) -> Tensor:
    """Compute the log-probabilities of a sequence's targets, from its first `length` tokens alone."""
    tokens = torch.from_numpy(datum.model_input[:length].astype(np.int64)).to(model.device)
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"][:length]).to(model.device)
    logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


@torch.no_grad()
def _check_causal(model: PreTrainedModel, probe: Probe, stock: Stock) -> None:
    run, number = next(iter(probe)), _ROUNDED[0]
    whole, length = stock.logprobs[run][number], len(stock.logprobs[run][number]) // 2
    with _adapted(model, stock.adapters[run]):
        part = stock_logprobs(model, probe[run][number], length).cpu().numpy()
    if rms(part - whole[:length]) > stock.logprob_bound:
        text = model.config.get_text_config(decoder=True).to_dict()
        empty = [name for name, value in text.items() if "window" in name and type(value) is int and value <= 0]
        hint = f": {empty[0]} is {text[empty[0]]} in config.json; set null for no window" if empty else ""
        raise Unsupported(f"{type(model).__name__} is not a causal language model{hint}.")

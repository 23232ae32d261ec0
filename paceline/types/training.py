"""Inputs and outputs of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import EmptyBatch, InvalidArgument, InvalidShape, UnknownField
from paceline.types.equality import ComparedByValue
from paceline.types.given import as_array, as_names, as_tokens

Array = NDArray[Any]
Tokens = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids, one after the other."""

TOKEN_INPUTS = frozenset({"target_tokens"})
"""Loss inputs that hold token ids (int64)."""

MASK_INPUTS = frozenset({"mask", "sequence_ratio_mask"})
"""Loss inputs that hold 0 or 1 (uint8)."""

MULTI_TARGET_INPUTS = frozenset({"target_tokens", "weights"})
"""Loss inputs that may have a second dimension: K targets per position."""


LOSS_INPUTS = (
    "target_tokens",
    "weights",
    "logprobs",
    "advantages",
    "reference_logprobs",
    "clip_low_threshold",
    "clip_high_threshold",
    "temperature",
    "sequence_ratio_mask",
    "mask",
)
"""Loss inputs that losses of the trainer read. A client-side loss may read others."""


@dataclass(slots=True, eq=False, init=False)
class Datum(ComparedByValue):
    """One training sequence of N tokens, already shifted.

    Position i of `model_input` predicts `loss_inputs["target_tokens"][i]`. Lists of Python numbers and tensors of torch
    are taken too: `target_tokens` becomes int64, masks uint8, everything else float32. Arrays of numpy keep their
    dtype; the server refuses the ones it does not take. Errors: InvalidDtype for text and for fractions where integers
    belong, InvalidShape, OutOfRange.
    """

    model_input: Array
    """Token ids, int32, shape [N]."""
    loss_inputs: dict[str, Array] = field(default_factory=dict)
    """Per-token inputs of the loss, each of shape [N]; which of them depends on the loss.

    target_tokens, weights, logprobs, advantages, reference_logprobs, clip_low_threshold, clip_high_threshold,
    temperature (the logits of a position are divided by it), sequence_ratio_mask, mask. For cross_entropy target_tokens
    and weights may both be of shape [N, K]: K targets per position, each with its weight.
    """

    def __init__(self, model_input: ArrayLike, loss_inputs: Mapping[str, ArrayLike] | None = None) -> None:
        self.model_input = as_array(model_input, np.dtype(np.int32), "model_input")
        self.loss_inputs = {
            name: as_array(values, _default_dtype(name), f"loss_inputs[{name}]")
            for name, values in (loss_inputs or {}).items()
        }

    @property
    def counted_positions(self) -> int:
        """How many positions count: those with mask 1, or all N without a mask."""
        mask = self.loss_inputs.get("mask")
        return len(self.model_input) if mask is None else int(np.count_nonzero(mask))

    @classmethod
    def from_completion(
        cls, prompt: Tokens, completion: Tokens, *, weight: float | None = None, **per_token: ArrayLike | float
    ) -> Datum:
        """Shift a prompt of P >= 1 tokens and its completion of T tokens into one datum of N = P + T - 1 positions.

        Positions that predict the prompt get mask 0 and the value 0. `per_token` values (logprobs, advantages, ...) are
        arrays of shape [T] or one number for all T. Without any, the datum is one for cross_entropy with `weight` (1
        unless given) on each completion token. Errors: those of Datum, EmptyBatch, UnknownField for a name that is
        nearly a loss input's, InvalidArgument for `weight` beside other values.
        """
        if per_token and weight is not None:
            raise InvalidArgument("is for a datum of cross_entropy alone; give weights=", field="weight")
        first = as_tokens(prompt, np.dtype(np.int32), "prompt").astype(np.int32)
        second = as_tokens(completion, np.dtype(np.int32), "completion").astype(np.int32)
        if not first.size:
            raise EmptyBatch("holds no token; the completion's first token is predicted from it", field="prompt")
        tokens, head, tail = np.concatenate([first, second]), len(first) - 1, len(second)
        values: Mapping[str, Any] = per_token or {"weights": 1.0 if weight is None else weight}
        inputs: dict[str, Array] = {
            "target_tokens": tokens[1:].astype(np.int64),
            "mask": np.concatenate([np.zeros(head, np.uint8), np.ones(tail, np.uint8)]),
        }
        for name, value in values.items():
            row = _completion_row(name, value, tail)
            inputs[name] = np.concatenate([np.zeros(head, row.dtype), row])
        return cls(tokens[:-1], inputs)


def _default_dtype(name: str) -> np.dtype[Any]:
    if name in TOKEN_INPUTS:
        return np.dtype(np.int64)
    return np.dtype(np.uint8 if name in MASK_INPUTS else np.float32)


def _completion_row(name: str, value: Any, length: int) -> Array:
    """Return an input of each of a completion's tokens."""
    near = get_close_matches(name, LOSS_INPUTS, n=1, cutoff=0.85)
    if near and near[0] != name:
        raise UnknownField(f"is no loss input; did you mean {near[0]}?", field=name)
    dtype = _default_dtype(name)
    row = as_array(value, dtype, name)
    if row.shape not in {(), (length,)}:
        raise InvalidShape(
            f"is {list(row.shape)}; give {length} numbers, one for each token, or one number", field=name
        )
    return np.broadcast_to(row, (length,)).astype(dtype)


class Reduction(Enum):
    """How the losses of a batch's tokens become one number. The values are those of the wire."""

    SUM = 1
    """Their sum: how a batch is split into calls changes nothing."""
    TOKEN_MEAN = 2
    """Their sum, divided by the batch's counted positions."""
    SEQUENCE_MEAN = 3
    """The mean over each datum's counted positions, and of those the mean over the datums that have any."""

    def count(self, data: Sequence[Datum]) -> int:
        """Return what a whole batch is divided by: its counted positions, its datums that have any, or 1."""
        counted = [datum.counted_positions for datum in data]
        match self:
            case Reduction.SUM:
                return 1
            case Reduction.TOKEN_MEAN:
                return sum(counted)
            case Reduction.SEQUENCE_MEAN:
                return sum(positions > 0 for positions in counted)


@dataclass(frozen=True, slots=True)
class ForwardBackwardSpec:
    """What a forward_backward computes of its data."""

    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    reduction: Reduction = Reduction.SUM
    reduction_count: int | None = None
    """What a mean divides by where the data is a part of a batch; None means that it is the whole."""
    forward_only: bool = False
    """Compute no gradient."""
    refuse_non_finite: bool = False
    """Fail, and leave the run as it was, where the loss or the gradient holds NaN or infinity."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The low-rank adapter that a run trains (LoRA, arXiv 2106.09685)."""

    rank: int = 32
    """Rank r."""
    alpha: float | None = None
    """The adapter's output is multiplied by alpha / r. None means 2 r."""
    dropout: float = 0.0
    """Dropout probability on the adapter's input."""
    seed: int = 0
    """Seed of the initial weights: the same seed gives the same weights everywhere."""
    train_attn: bool = True
    """Adapters on attention, or what is in its place (linear attention, state-space mixers, short convolutions).

    All of its linear layers, by the architecture's own names. A run is refused where a part of the weights can have no
    adapter; `layers` may leave those out, and `target_modules` names what can.
    """
    train_mlp: bool = True
    """Adapters on the MLPs' linear layers, routers apart; refused as `train_attn`, so for experts in one tensor."""
    train_unembed: bool = False
    """An adapter on the output head."""
    layers: tuple[int, ...] = ()
    """Indices of the layers that get an adapter. Empty means all."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead (rsLoRA, arXiv 2312.03732)."""
    target_modules: tuple[str, ...] = ()
    """Names of the modules that get an adapter, as PEFT's `target_modules`: "q_proj", "self_attn.q_proj", a full name.

    They are named in place of `train_attn`, `train_mlp` and `train_unembed`, which keep their defaults then. With
    `layers`, those of these layers.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_modules", as_names(self.target_modules, "target_modules"))


class WeightStorage(Enum):
    """How a full-parameter run keeps its weights between steps. The values are those of the wire."""

    FLOAT32 = 1
    """In float32; where the trainer computes in bfloat16, a rounded copy beside them is computed with."""
    BFLOAT16 = 2
    """In bfloat16, which the run is computed in too; each step rounds stochastically."""


@dataclass(frozen=True, slots=True)
class FullParameters:
    """All parameters of the base model, of which the run has a copy of its own."""

    storage: WeightStorage = WeightStorage.FLOAT32
    seed: int = 0
    """Seed of what the run draws: the rounding of `BFLOAT16`."""


RunParameters: TypeAlias = LoraConfig | FullParameters
"""What a run trains."""


@dataclass(slots=True, eq=False)
class ForwardBackwardOutput(ComparedByValue):
    """What a forward (and backward) pass gave back."""

    loss_fn_outputs: list[dict[str, Array]]
    """One per datum: always `logprobs`, float32, of the shape of `target_tokens`.

    They are 0 where the datum's mask is 0, so that sums and products over all positions are those of the counted ones.
    The mask says which these are: a 0 is no log-probability there.
    """
    metrics: dict[str, float]
    """Named name:reduction, always with `loss:sum` and `tokens:sum`."""


@dataclass(frozen=True, slots=True)
class OptimStepOutput:
    """What an optimizer step did."""

    step: int
    """Steps taken, this one included."""
    grad_norm: float
    """Euclidean norm of the gradient before clipping."""
    learning_rate: float
    """The rate that was used, before any scaling of single weights."""
    tokens: int
    """Tokens whose loss went into the gradient."""
    milliseconds: float
    """Time in the engine."""

"""Inputs and outputs of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

TOKEN_INPUTS = frozenset({"target_tokens"})
"""Loss inputs that hold token ids (int64)."""

MASK_INPUTS = frozenset({"mask", "sequence_ratio_mask"})
"""Loss inputs that hold 0 or 1 (uint8)."""

MULTI_TARGET_INPUTS = frozenset({"target_tokens", "weights"})
"""Loss inputs that may have a second dimension: K targets per position."""


@dataclass(slots=True)
class Datum:
    """One training sequence of N tokens, already shifted.

    Position i of `model_input` predicts `loss_inputs["target_tokens"][i]`. Sequences of Python numbers are taken too:
    `target_tokens` becomes int64, masks uint8, everything else float32. Arrays keep their dtype; the server refuses
    the ones it does not take.
    """

    model_input: Array
    """Token ids, int32, shape [N]."""
    loss_inputs: dict[str, Array] = field(default_factory=dict)
    """Per-token inputs of the loss, each of shape [N]; which of them depends on the loss.

    target_tokens, weights, logprobs, advantages, reference_logprobs, clip_low_threshold, clip_high_threshold,
    sequence_ratio_mask, mask. For cross_entropy target_tokens and weights may both be of shape [N, K]: K targets per
    position, each with its weight.
    """

    def __post_init__(self) -> None:
        self.model_input = _as_array(self.model_input, np.dtype(np.int32))
        self.loss_inputs = {name: _as_array(values, _default_dtype(name)) for name, values in self.loss_inputs.items()}

    @property
    def counted_positions(self) -> int:
        """How many positions count: those with mask 1, or all N without a mask."""
        mask = self.loss_inputs.get("mask")
        return len(self.model_input) if mask is None else int(np.count_nonzero(mask))

    @classmethod
    def from_completion(
        cls, prompt: Sequence[int], completion: Sequence[int], *, weight: float = 1.0, **per_token: ArrayLike | float
    ) -> Datum:
        """Shift a prompt of P tokens and its completion of T tokens into one datum of N = P + T - 1 positions.

        Positions that predict the prompt get mask 0 and the value 0. `per_token` values (logprobs, advantages, ...)
        are arrays of shape [T] or one
        number for all T. Without any, the datum is one for cross_entropy with `weight` on each completion token.
        """
        tokens = np.concatenate([np.asarray(prompt, np.int32), np.asarray(completion, np.int32)])
        head, tail = len(prompt) - 1, len(completion)
        values: Mapping[str, Any] = per_token or {"weights": weight}
        inputs: dict[str, Array] = {
            "target_tokens": tokens[1:].astype(np.int64),
            "mask": np.concatenate([np.zeros(head, np.uint8), np.ones(tail, np.uint8)]),
        }
        for name, value in values.items():
            dtype = _default_dtype(name)
            row = np.broadcast_to(np.asarray(value, dtype), (tail,))
            inputs[name] = np.concatenate([np.zeros(head, dtype), row])
        return cls(tokens[:-1], inputs)


def _default_dtype(name: str) -> np.dtype[Any]:
    if name in TOKEN_INPUTS:
        return np.dtype(np.int64)
    return np.dtype(np.uint8 if name in MASK_INPUTS else np.float32)


def _as_array(values: ArrayLike, dtype: np.dtype[Any]) -> Array:
    return values if isinstance(values, np.ndarray) else np.asarray(values, dtype)


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
    """Adapters on attention projections."""
    train_mlp: bool = True
    """Adapters on MLP projections."""
    train_unembed: bool = False
    """An adapter on the output head."""
    layers: tuple[int, ...] = ()
    """Indices of the layers that get an adapter. Empty means all."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead (rsLoRA, arXiv 2312.03732)."""


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


@dataclass(slots=True)
class ForwardBackwardOutput:
    """What a forward (and backward) pass gave back."""

    loss_fn_outputs: list[dict[str, Array]]
    """One per datum: always `logprobs`, float32, of the shape of `target_tokens`, NaN where the mask is 0."""
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

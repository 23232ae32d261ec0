"""Inputs and outputs of training, and the arrays in them: compared by value, and converted from what users give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import (
    EmptyBatch,
    InvalidArgument,
    InvalidDtype,
    InvalidShape,
    OutOfRange,
    TokenOutOfRange,
    UnknownField,
)
from paceline.spans import span
from paceline.types.hints import hinted
from paceline.types.reprs import ShortRepr

Array = NDArray[Any]
Tokens: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]] | ModelInput"
"""A sequence of token ids."""

TOKEN_INPUTS = frozenset({"target_tokens"})
"""Loss inputs that hold token ids (int64)."""

MASK_INPUTS = frozenset({"mask", "sequence_ratio_mask"})
"""Loss inputs that hold 0 or 1 (uint8)."""

ADVANTAGE_TOKENS = "advantage_tokens:sum"
"""Metric: the counted positions whose advantage is not 0."""

ADVANTAGE_MEANS = frozenset({"ratio:mean", "kl:mean", "clip_fraction:mean"})
"""Metrics that are means over those positions."""

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
"""Loss inputs that the trainer's losses read. A client-side loss may read others."""

_CONVERTED_KINDS = frozenset({"ff", "bf", "bu"})
"""Kinds of numpy dtypes, from and to, between which arrays are converted: floats, bool, unsigned integers."""

_ENCODE = "give token ids or numbers: encode it with the model's tokenizer, `get_tokenizer().encode(text)`"


class ComparedByValue:
    """Base of dataclasses declared with `eq=False`, whose instances are equal if their fields are `same`."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # arrays are mutable

    def __eq__(self, other: object) -> bool:
        return same(self, other) if type(other) is type(self) else NotImplemented


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The token ids of a prompt or of a datum, under Tinker's name; a plain list or array of them will do as well."""

    tokens: tuple[int, ...] = ()
    """Token ids."""

    @classmethod
    def from_ints(cls, tokens: Tokens) -> ModelInput:
        """Return the input of `tokens`, N token ids. Errors: InvalidDtype, InvalidShape, OutOfRange."""
        dtype = np.dtype(np.int32)
        return cls(tuple(_cast(as_tokens(tokens, dtype, "tokens"), dtype, "tokens").tolist()))

    def to_ints(self) -> list[int]:
        """Return the token ids."""
        return list(self.tokens)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass(slots=True, eq=False, init=False)
class Datum(ComparedByValue):
    """One training sequence of N tokens, already shifted.

    Position i of `model_input`, token ids or a ModelInput, predicts `loss_fn_inputs["target_tokens"][i]`.

    Lists of Python numbers and torch tensors are converted: `target_tokens` to int64, masks to uint8, all other loss
    inputs to float32. So are numpy arrays of bools for masks, and of bools and floats for inputs in float32. Other
    numpy arrays keep their dtype, except in `from_completion`; the server refuses unsupported ones. Errors:
    InvalidDtype for text and for fractions where integers are required, InvalidShape, OutOfRange, InvalidArgument.
    """

    model_input: Array
    """Token ids, int32, shape [N]."""
    loss_fn_inputs: dict[str, Array] = field(default_factory=dict)
    """Per-token inputs, each of shape [N]; the loss determines which are needed.

    target_tokens, weights, logprobs, advantages, reference_logprobs, clip_low_threshold, clip_high_threshold,
    temperature (divides the logits of a position), sequence_ratio_mask, mask. For cross_entropy, target_tokens and
    weights may both have shape [N, K]: K targets per position, each with its weight.
    """

    @hinted(
        **{name: f'loss_fn_inputs={{"{name}": ...}}' for name in LOSS_INPUTS},
        input_ids="model_input=...",
        tokens="model_input=...",
        labels='loss_fn_inputs={"target_tokens": ...}, shifted by one',
    )
    def __init__(
        self, model_input: ArrayLike | ModelInput, loss_fn_inputs: Mapping[str, ArrayLike] | None = None
    ) -> None:
        if not isinstance(loss_fn_inputs, Mapping | None):
            message = f"is a {type(loss_fn_inputs).__name__}; give a dict of names and arrays"
            raise InvalidArgument(message, field="loss_fn_inputs")
        for name in loss_fn_inputs or {}:
            if not isinstance(name, str):
                raise InvalidArgument.of_type(name, "names that are strings", "loss_fn_inputs")
        self.model_input = as_array(model_input, np.dtype(np.int32), "model_input")
        self.loss_fn_inputs = {
            name: as_array(values, _default_dtype(name), f"loss_fn_inputs[{name}]")
            for name, values in (loss_fn_inputs or {}).items()
        }

    @property
    def counted_positions(self) -> int:
        """Number of counted positions: those with a non-zero mask, or all N without a mask."""
        mask = self.loss_fn_inputs.get("mask")
        return len(self.model_input) if mask is None else int(np.count_nonzero(mask))

    @classmethod
    def from_completion(
        cls, prompt: Tokens, completion: Tokens, *, weight: float | None = None, **per_token: ArrayLike | float
    ) -> Datum:
        """Shift a prompt of P >= 1 tokens and its completion of T tokens into one datum of N = P + T - 1 positions.

        Positions that predict the prompt get mask 0 and the value 0. `per_token` values (logprobs, advantages, ...) are
        arrays of shape [T] or one number for all T. Without any, the datum is for cross_entropy, with `weight` (default
        1) on each completion token. Errors: those of Datum, EmptyBatch, UnknownField for a name that looks like a
        misspelt loss input, InvalidArgument for `weight` together with other values and for `target_tokens`.
        """
        if per_token and weight is not None:
            raise InvalidArgument("is only for a datum of cross_entropy; give weights= instead", field="weight")
        if "target_tokens" in per_token:
            raise InvalidArgument("are the completion's tokens; make other targets with Datum", field="target_tokens")
        dtype = np.dtype(np.int32)
        first = _cast(as_tokens(prompt, dtype, "prompt"), dtype, "prompt")
        second = _cast(as_tokens(completion, dtype, "completion"), dtype, "completion")
        if not first.size:
            raise EmptyBatch("holds no token; the completion's first token is predicted from it", field="prompt")
        if len(first) + len(second) == 1:
            raise EmptyBatch("holds no token, and prompt only one, so nothing is predicted", field="completion")
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
    """Return a loss input with one value per completion token, shape [length]."""
    near = get_close_matches(name, LOSS_INPUTS, n=1, cutoff=0.85)
    if near and near[0] != name:
        raise UnknownField(f"is not a loss input; did you mean {near[0]}?", field=name)
    dtype = _default_dtype(name)
    row = _cast(as_array(value, dtype, name), dtype, name)
    if row.shape not in {(), (length,)}:
        raise InvalidShape(
            f"is {list(row.shape)}; give {length} numbers, one for each token, or one number", field=name
        )
    return np.broadcast_to(row, (length,))


class Reduction(Enum):
    """How the losses of a batch's tokens are reduced to one number. The values are those on the wire."""

    SUM = 1
    """The sum, which does not depend on how a batch is split into calls."""
    TOKEN_MEAN = 2
    """The sum divided by the number of the batch's counted positions."""
    SEQUENCE_MEAN = 3
    """The mean over each datum's counted positions, averaged over the datums that have any."""

    def count(self, data: Sequence[Datum]) -> int:
        """Return the divisor for a whole batch: its counted positions, its datums that have any, or 1."""
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
    """What a forward_backward computes on its data."""

    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    reduction: Reduction = Reduction.SUM
    reduction_count: int | None = None
    """Divisor of a mean if the data is part of a larger batch; None means that the data is the whole batch."""
    forward_only: bool = False
    """Compute no gradient."""
    refuse_non_finite: bool = False
    """Fail and leave the run unchanged if the loss or the gradient holds NaN or infinity."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Configuration of the low-rank adapter that a run trains (LoRA, arXiv 2106.09685)."""

    rank: int = 32
    """Rank r."""
    alpha: float | None = None
    """The adapter's output is multiplied by alpha / r. None means 2 r."""
    dropout: float = 0.0
    """Dropout probability on the adapter's input."""
    seed: int = 0
    """Seed of the initial weights: the same seed gives the same weights everywhere."""
    train_attn: bool = True
    """Adapt attention, or its replacement (linear attention, state-space mixers, short convolutions).

    Covers all of its linear layers, by the architecture's own names. A run is refused if some of these weights cannot
    have an adapter; exclude them with `layers`, or name the modules that can with `target_modules`.
    """
    train_mlp: bool = True
    """Adapt the MLPs' linear layers, except routers; refused like `train_attn`, e.g. for experts in one tensor."""
    train_unembed: bool = False
    """Adapt the output head."""
    layers: Sequence[int] = ()
    """Indices of the layers that get an adapter. Empty means all."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead (rsLoRA, arXiv 2312.03732)."""
    target_modules: tuple[str, ...] = ()
    """Modules that get an adapter, named as in PEFT's `target_modules`: "q_proj", "self_attn.q_proj" or a full name.

    Use this instead of `train_attn`, `train_mlp` and `train_unembed`, which must then keep their defaults. `layers`
    restricts it to these layers.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_modules", as_names(self.target_modules, "target_modules"))


class WeightStorage(Enum):
    """How a full-parameter run stores its weights between steps. The values are those on the wire."""

    FLOAT32 = 1
    """In float32. If the trainer computes in bfloat16, it computes with a rounded copy kept beside them."""
    BFLOAT16 = 2
    """In bfloat16, which the run also computes in; each step rounds stochastically."""


@dataclass(frozen=True, slots=True)
class FullParameters:
    """Train all parameters of the base model, on the run's own copy."""

    storage: WeightStorage = WeightStorage.FLOAT32
    """How the run keeps its weights between steps."""
    seed: int = 0
    """Seed of the run's random numbers: the stochastic rounding of `BFLOAT16`."""


RunParameters: TypeAlias = LoraConfig | FullParameters
"""The parameters that a run trains."""


@dataclass(slots=True, eq=False, repr=False)
class ForwardBackwardOutput(ComparedByValue, ShortRepr):
    """The result of a forward (and backward) pass."""

    loss_fn_outputs: list[dict[str, Array]]
    """One per datum: always `logprobs`, float32, in the shape of `target_tokens`.

    They are 0 where the datum's mask is 0, so that sums and products over all positions equal those over the counted
    positions. Such a 0 is not a log-probability: use the mask to tell.
    """
    metrics: dict[str, float]
    """Keys have the form name:reduction; always includes `loss:sum` and `tokens:sum`."""


@dataclass(frozen=True, slots=True, repr=False)
class OptimStepOutput(ShortRepr):
    """The result of an optimizer step."""

    step: int
    """Steps taken, including this one."""
    grad_norm: float
    """Euclidean norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate used, before any per-weight scaling."""
    tokens: int
    """Number of tokens whose loss contributed to the gradient."""
    milliseconds: float
    """Time in the engine."""


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal. Arrays compare by dtype, shape and elements, with NaN equal to NaN."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    if is_dataclass(one) and type(one) is type(other):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def as_array(values: Any, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Convert numbers to an array of `dtype`.

    Numpy arrays of integers keep their dtype: tokens have two, and a loss of one's own may read integers. So do those
    that `dtype` would not hold, such as floats where integers are required.

    Raises InvalidDtype for text, other non-numbers, and fractions where integers are required, InvalidShape for rows
    of different lengths, OutOfRange for integers that do not fit `dtype`.
    """
    values = _own_array(_ids_of(values, field), field)
    if isinstance(values, np.ndarray):
        is_converted = values.dtype.kind + dtype.kind in _CONVERTED_KINDS
        return values.astype(dtype, copy=False) if is_converted else values
    if isinstance(values, str | bytes):
        raise InvalidDtype(f"is text; {_ENCODE}", field=field)
    try:
        array = np.asarray(_from_torch(values))
    except (TypeError, ValueError, OverflowError) as problem:
        reason = "its rows differ in length" if "inhomogeneous" in str(problem) else str(problem)
        raise InvalidShape(f"is not an array of numbers: {reason}; give one sequence", field=field) from problem
    return _cast(array, dtype, field)


def as_tokens(values: Any, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Convert to an array of token ids, shape [N]. Raises what `as_array` raises, InvalidShape, InvalidDtype."""
    array = as_array(values, dtype, field)
    if array.ndim != 1:
        several = f": it holds {len(array)} sequences, give one of them" if array.ndim == 2 else ""
        is_one = array.ndim == 0
        shape = (
            "is one number; give a list of them" if is_one else f"is {list(array.shape)}; give one dimension{several}"
        )
        raise InvalidShape(shape, field=field)
    if array.dtype.kind not in "iu":
        raise InvalidDtype(f"holds {_describe(array)}; {_ENCODE if _is_text(array) else 'give integers'}", field=field)
    return array


def _ids_of(values: Any, field: str) -> Any:
    """Return the token ids of what a tokenizer returned for one text; anything else as it is.

    `tokenizer(text)` and `apply_chat_template` return a mapping with `input_ids`, a list or, with `return_tensors`, one
    row. Raises InvalidShape for several sequences, InvalidArgument for padding and for other mappings.
    """
    if isinstance(values, list | tuple) and values and isinstance(values[0], Mapping):
        message = "is a list of mappings; give one text's token ids, of messages `apply_chat_template(messages)`"
        raise InvalidArgument(message, field=field)
    if not isinstance(values, Mapping):
        return values
    if "input_ids" not in values:
        raise InvalidArgument(f"is a {type(values).__name__} without input_ids; give the numbers alone", field=field)
    ids, mask = _from_torch(values["input_ids"]), _from_torch(values.get("attention_mask"))
    rows = [ids] if len(ids) == 0 or isinstance(ids[0], Integral) else ids
    if len(rows) != 1:
        raise InvalidShape(f"holds {len(rows)} sequences; give one at a time, .input_ids[0] for the first", field=field)
    if mask is not None and not np.all(np.asarray(mask)):
        raise InvalidArgument("is padded; tokenize one text without padding, and give its .input_ids", field=field)
    return rows[0]


def _own_array(values: Any, field: str) -> Any:
    """Return the numbers of a ModelInput, also of Tinker's, or of its TensorData; anything else as it is.

    Raises InvalidArgument for an input that holds more than token ids.
    """
    if callable(to_ints := getattr(values, "to_ints", None)):
        try:
            return to_ints()
        except ValueError as problem:
            raise InvalidArgument(f"is no list of token ids: {problem}", field=field) from problem
    return to_numpy() if callable(to_numpy := getattr(values, "to_numpy", None)) else values


def as_names(values: Iterable[str], field: str) -> tuple[str, ...]:
    """Convert to a tuple of names. Raises InvalidArgument for a single string, whose letters would be names."""
    if isinstance(values, str | bytes):
        raise InvalidArgument(f"is one string; give a list of them, [{values!r}]", field=field)
    if not is_iterable(values):
        raise InvalidArgument.of_type(values, "a list of names", field)
    return tuple(values)


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Return whether a value has elements to iterate over; an array without dimensions has the method, but none."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def _from_torch(values: Any) -> Any:
    """Convert a torch tensor to numpy: detached, on the CPU, floats as float64 (numpy lacks bfloat16)."""
    if not all(hasattr(values, name) for name in ("detach", "cpu", "is_floating_point")):
        return values
    tensor = values.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _cast(array: NDArray[Any], dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Return a copy in `dtype`. Raises InvalidDtype for what are no numbers of its kind, OutOfRange."""
    if array.dtype.kind == "O":
        raise _refusal_of_objects(array, dtype, field)
    if array.dtype.kind not in "biuf":
        raise InvalidDtype(f"holds {_describe(array)}; {_ENCODE if _is_text(array) else 'give numbers'}", field=field)
    if dtype.kind in "iu" and array.size:
        _check_integers(array, dtype, field)
    return array.astype(dtype)


def _refusal_of_objects(array: NDArray[Any], dtype: np.dtype[Any], field: str) -> InvalidArgument:
    """Return the error of Python objects that numpy has no number for."""
    wanted = "a list of token ids" if dtype.kind == "i" else "numbers"
    other = next((type(value) for value in array.flat if not isinstance(value, Integral)), None)
    if other is None:
        return OutOfRange(f"holds an integer of more than 64 bits; give {wanted}", field=field)
    return InvalidDtype(f"holds {other.__name__}; give {wanted}", field=field)


def _check_integers(array: NDArray[Any], dtype: np.dtype[Any], field: str) -> None:
    limits = np.iinfo(dtype)
    if array.dtype.kind == "b" and dtype.kind == "i":
        raise InvalidDtype("holds bool; give token ids", field=field)
    if not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
        raise InvalidDtype(f"holds fractions, {_describe(array)}; give integers", field=field)
    if array.min() < limits.min or array.max() > limits.max:
        raise OutOfRange(f"holds a number outside {limits.min} to {limits.max}, the range of {dtype.name}", field=field)


def _describe(array: NDArray[Any]) -> str:
    return "text" if _is_text(array) else array.dtype.name


def _is_text(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "SU"


def are_tokens(tokens: Array, vocab_size: int) -> bool:
    """Return whether all of these numbers, one at least, are ids of a vocabulary."""
    return bool(tokens.min() >= 0 and tokens.max() < vocab_size)


def check_vocabulary(tokens: Array, vocab_size: int, field: str) -> None:
    """Check that all of these numbers, one at least, are ids of a vocabulary. Raises TokenOutOfRange."""
    if are_tokens(tokens, vocab_size):
        return
    position = np.argwhere((tokens < 0) | (tokens >= vocab_size))[0]
    bad, last = int(tokens[tuple(position)]), vocab_size - 1
    place = ", ".join(map(str, position))
    message = f"holds {bad} at position {place}; the vocabulary has {vocab_size} tokens, with ids {span(0, last)}"
    metadata = {"value": str(bad), "minimum": "0", "maximum": str(last)}
    raise TokenOutOfRange(message, field=field, metadata=metadata)

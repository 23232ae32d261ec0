"""Validation of every request, by numbers and names alone, before anything changes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline import errors
from paceline.types import Datum, ForwardBackwardSpec, LoraConfig, ModelInfo, Reduction
from paceline.types.training import MASK_INPUTS, Array, are_tokens, check_vocabulary
from trainer_service.engine_link.loss_specs import (
    CLIP_HIGH,
    CLIP_LOW,
    MASK,
    SEQUENCE_RATIO_MASK,
    TEMPERATURE,
    TEMPERATURES,
    LossSpec,
    ResolvedLoss,
    resolve_loss,
)

_DEFAULT_LORA = LoraConfig()
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_TARGETS = (512, 256)
"""Most entries, and most characters in each."""


def check_request_id(request_id: str, per: str) -> None:
    """Check the key that makes a call safe to repeat; `per` says for what a new one is generated."""
    if not request_id:
        message = f"is not set; generate one per {per}, and give the same one when the call is repeated"
        raise errors.MissingField(message, field="request_id")
    if not _REQUEST_ID.fullmatch(request_id):
        raise errors.InvalidName("must be 1 to 64 characters of [A-Za-z0-9_-]", field="request_id")


def check_base_model(name: str, model: ModelInfo) -> None:
    """Check that a request names the base model that is served; an empty name means that one."""
    if name not in {"", model.name}:
        raise errors.ModelNotFound.of(model.name, "base_model")


def check_lora(lora: LoraConfig, model: ModelInfo) -> None:
    """Check an adapter's configuration against the base model."""
    if lora.rank > model.max_lora_rank:
        raise errors.RankTooLarge(f"is {lora.rank}; at most {model.max_lora_rank} is supported", field="lora.rank")
    alpha = 0.0 if lora.alpha is None else lora.alpha
    _check_range(lora.rank, "lora.rank", 1, model.max_lora_rank)
    if not (math.isfinite(alpha) and alpha > 0):
        raise errors.OutOfRange("must be a positive number", field="lora.alpha")
    _check_range(lora.dropout, "lora.dropout", 0.0, 1.0, high_open=True)
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise errors.InvalidArgument("nothing to train; set train_attn, train_mlp or train_unembed", field="lora")
    _check_targets(lora)
    for index, layer in enumerate(lora.layers):
        if layer >= model.num_layers:
            raise errors.OutOfRange(
                f"is {layer}; the model has {model.num_layers} layers", field=f"lora.layers[{index}]"
            )


def _check_targets(lora: LoraConfig) -> None:
    entries, size = _MAX_TARGETS
    if len(lora.target_modules) > entries:
        message = f"has {len(lora.target_modules)} entries; at most {entries} are accepted; use name suffixes"
        raise errors.OutOfRange(message, field="lora.target_modules")
    for index, name in enumerate(lora.target_modules):
        if not 0 < len(name) <= size:
            message = f"has {len(name)} characters; give 1 to {size}"
            raise errors.OutOfRange(message, field=f"lora.target_modules[{index}]")
    for flag in ("train_attn", "train_mlp", "train_unembed"):
        if lora.target_modules and getattr(lora, flag) != getattr(_DEFAULT_LORA, flag):
            raise errors.InvalidArgument("leave it unset: target_modules selects the modules", field=f"lora.{flag}")


def check_batch(
    data: Sequence[Datum], spec: ForwardBackwardSpec, model: ModelInfo, max_datums: int
) -> ForwardBackwardSpec:
    """Check a batch against its loss and the base model; return its spec with the loss's defaults filled in."""
    loss = resolve_loss(spec.loss_fn, spec.loss_fn_config)
    if not data:
        raise errors.EmptyBatch("has no datums; send at least one", field="data")
    if len(data) > max_datums:
        raise errors.OutOfRange(f"has {len(data)} datums; at most {max_datums} are accepted, split it", field="data")
    if not are_tokens(np.concatenate([datum.model_input for datum in data]), model.vocab_size):
        for index, datum in enumerate(data):
            check_vocabulary(datum.model_input, model.vocab_size, f"data[{index}].model_input")
    for index, datum in enumerate(data):
        _check_form(datum, f"data[{index}]", loss, model)
    if not _holds_valid_values(data, loss, model):
        for index, datum in enumerate(data):
            _check_values(datum, f"data[{index}]", loss, model)
    if not any(datum.counted_positions for datum in data):
        raise errors.EmptyBatch("every position is masked; set mask to 1 where the loss counts", field="data")
    _check_reduction(data, spec.reduction, spec.reduction_count)
    return replace(spec, loss_fn_config=loss.config)


def _check_reduction(data: Sequence[Datum], reduction: Reduction, count: int | None) -> None:
    if count is None:
        return
    if reduction is Reduction.SUM:
        raise errors.InvalidArgument("a sum has no divisor; leave it unset", field="reduction_count")
    if count < reduction.count(data):
        message = f"is {count}, but this part of the batch alone has {reduction.count(data)}; count the whole batch"
        raise errors.OutOfRange(message, field="reduction_count")


def _check_form(datum: Datum, field: str, loss: ResolvedLoss, model: ModelInfo) -> None:
    spec, length = loss.spec, datum.model_input.shape[0]
    if length > model.max_context_length:
        message = f"has {length} tokens; the model accepts at most {model.max_context_length}"
        raise errors.SequenceTooLong(message, field=f"{field}.model_input")
    _check_names(datum, field, spec, loss.required)
    _check_shapes(datum, field, spec)
    _check_sequence_mask(datum, f"{field}.loss_inputs[{SEQUENCE_RATIO_MASK}]")


def _holds_valid_values(data: Sequence[Datum], loss: ResolvedLoss, model: ModelInfo) -> bool:
    """Whether the values of datums that can be joined are valid: numpy checks them at once several times faster."""
    names = data[0].loss_fn_inputs.keys()
    if any(datum.loss_fn_inputs.keys() != names or datum.loss_fn_inputs["target_tokens"].ndim > 1 for datum in data):
        return False
    joined = Datum(
        np.concatenate([datum.model_input for datum in data]),
        {name: np.concatenate([datum.loss_fn_inputs[name] for datum in data]) for name in names},
    )
    try:
        _check_values(joined, "data", loss, model)
    except errors.PacelineError:
        return False  # of which datum is said by its own check
    return True


def _check_names(datum: Datum, field: str, spec: LossSpec, required: Sequence[str]) -> None:
    known = {*spec.required, *spec.optional}
    missing = [name for name in required if name not in datum.loss_fn_inputs]
    unknown = [name for name in datum.loss_fn_inputs if name not in known]
    if missing:  # before what is unknown, which may be a client's default for a datum without these
        message = f"{spec.name} needs {' and '.join(missing)}; send one value per token"
        if unknown:
            message += f", and leave out {' and '.join(unknown)}, which it does not have"
        raise errors.MissingField(message, field=f"{field}.loss_inputs[{missing[0]}]")
    for name in unknown:
        message = f"{spec.name} has no such input; it accepts {', '.join(sorted(known))}"
        raise errors.UnknownField(message, field=f"{field}.loss_inputs[{name}]")


def _check_shapes(datum: Datum, field: str, spec: LossSpec) -> None:
    length = len(datum.model_input)
    for name, values in datum.loss_fn_inputs.items():
        where = f"{field}.loss_inputs[{name}].shape"
        if len(values) != length:
            raise errors.InvalidShape(f"has {len(values)} values for {length} tokens; send one per token", field=where)
        if values.ndim > 1 and (name not in spec.multi or values.size == 0):
            raise errors.InvalidShape(f"is {list(values.shape)}; {spec.name} accepts one value per token", field=where)
    targets = datum.loss_fn_inputs["target_tokens"].shape
    for name in spec.multi:
        if (shape := datum.loss_fn_inputs[name].shape) != targets:
            message = f"is {list(shape)}, but target_tokens is {list(targets)}; send one per target"
            raise errors.InvalidShape(message, field=f"{field}.loss_inputs[{name}].shape")


def _check_values(datum: Datum, field: str, loss: ResolvedLoss, model: ModelInfo) -> None:
    """Check each value by itself, and with others at its position alone, so that joined datums can be checked too."""
    spec, inputs = loss.spec, datum.loss_fn_inputs
    for name in MASK_INPUTS & inputs.keys():
        if inputs[name].max() > 1:
            raise errors.OutOfRange("holds values other than 0 and 1", field=f"{field}.loss_inputs[{name}]")
    counted = _counted(datum)
    check_vocabulary(inputs["target_tokens"], model.vocab_size, f"{field}.loss_inputs[target_tokens]")
    for name in sorted(spec.finite & inputs.keys()):
        if not np.isfinite(inputs[name][counted]).all():
            raise errors.NonFinite("holds NaN or infinity where the mask is 1", field=f"{field}.loss_inputs[{name}]")
    if TEMPERATURE in inputs:
        _check_temperatures(inputs[TEMPERATURE][counted], f"{field}.loss_inputs[{TEMPERATURE}]")
    for name in sorted(spec.nonpositive & inputs.keys()):
        if (inputs[name][_read(datum, name, loss)] > 0).any():
            message = "holds a log-probability above 0 at a position that counts; send what the model returned"
            if name in spec.read_everywhere:
                message += f", and set {MASK} to 0 where there is none: {spec.name} reads it whatever the advantage"
            raise errors.PositiveLogprob(message, field=f"{field}.loss_inputs[{name}]")
    if spec.overrides:
        _check_thresholds(datum, field, spec, loss.config)


def _check_temperatures(temperatures: Array, field: str) -> None:
    low, high = TEMPERATURES
    if (temperatures <= 0).any():
        message = "holds a value that is not positive; leave it out, or send 1, for tokens that were sampled greedily"
        raise errors.OutOfRange(message, field=field)
    if ((temperatures < np.float32(low)) | (temperatures > np.float32(high))).any():
        raise errors.OutOfRange(f"holds a value below {low:g} or above {high:g}", field=field)


def _read(datum: Datum, name: str, loss: ResolvedLoss) -> Array:
    """Return where the loss reads an input of log-probabilities: bool, shape [N]."""
    inputs, counted = datum.loss_fn_inputs, _counted(datum)
    with_advantage: Array = counted & (inputs["advantages"] != 0)
    if name not in loss.spec.read_everywhere or name not in loss.required:
        return with_advantage
    chosen = inputs.get(SEQUENCE_RATIO_MASK)
    return counted if chosen is None else with_advantage | (counted & (chosen != 0))


def _check_sequence_mask(datum: Datum, field: str) -> None:
    chosen, counted = datum.loss_fn_inputs.get(SEQUENCE_RATIO_MASK), _counted(datum)
    if chosen is not None and counted.any() and not (counted & (chosen != 0)).any():
        raise errors.InvalidArgument("is 0 wherever mask is 1; the sequence's ratio needs a position", field=field)


def _check_thresholds(datum: Datum, field: str, spec: LossSpec, config: Mapping[str, float]) -> None:
    """Check per-position thresholds: none below its minimum, and no lower threshold above the upper one."""
    counted, given = _counted(datum), [name for name in spec.overrides if name in datum.loss_fn_inputs]
    for name in given:
        minimum = spec.settings[name].minimum
        if (datum.loss_fn_inputs[name][counted] < minimum).any():
            raise errors.OutOfRange(f"holds a value below {minimum:g}", field=f"{field}.loss_inputs[{name}]")
    low, high = (datum.loss_fn_inputs.get(name, np.float32(config[name])) for name in (CLIP_LOW, CLIP_HIGH))
    if given and np.any((low > high) & counted):
        message = f"{CLIP_LOW} is above {CLIP_HIGH} at a position; swap or change them"
        raise errors.OutOfRange(message, field=f"{field}.loss_inputs[{given[0]}]")


def _counted(datum: Datum) -> Array:
    """Return the mask of positions that count: bool, shape [N]."""
    mask = datum.loss_fn_inputs.get(MASK)
    return np.ones(datum.model_input.shape, bool) if mask is None else mask != 0


def _check_range(value: float, field: str, low: float, high: float, *, high_open: bool = False) -> None:
    inside = low <= value < high if high_open else low <= value <= high
    if not inside:
        top = "below" if high_open else "at most"
        wanted = f"{low:g}" if low == high else f"at least {low:g} and {top} {high:g}"
        raise errors.OutOfRange(f"is {value:g}; must be {wanted}", field=field)

"""The losses, their inputs and their settings, and the refusal of others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from paceline.errors import NonFinite, OutOfRange, UnknownField, UnknownLoss

MASK = "mask"
"""Loss input that every loss accepts: uint8, shape [N]; 0 excludes the position from loss, gradient and output."""

TEMPERATURE = "temperature"
"""Loss input that every loss accepts: float32, shape [N]; the position's logits are divided by it."""

TEMPERATURES = (1e-3, 1e3)
"""The lowest and the highest temperature. Logits divided by less may overflow, whatever the position's weight."""

_LARGEST = 1e30
"""The largest setting: float32 holds it, and its product with a loss."""

SEQUENCE_RATIO_MASK = "sequence_ratio_mask"
"""Loss input of gspo: uint8, shape [N]; 0 excludes a counted position from the mean of the log ratio."""

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
"""Settings of the losses that clip, and optional loss inputs (float32, shape [N]) that override them per position."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A numeric setting of a loss."""

    default: float
    minimum: float = 0.0


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What a loss reads. Inputs have shape [N], one value per position of the datum, except those in `multi`."""

    name: str
    required: tuple[str, ...]
    """Inputs that every datum must have."""
    required_with: Mapping[str, str]
    """Input -> the setting that, if above 0, makes it required; otherwise the input is optional and unused."""
    settings: Mapping[str, Setting]
    finite: frozenset[str]
    """Inputs that must be finite on counted positions."""
    nonpositive: frozenset[str]
    """Inputs that are log-probabilities: at most 0 on counted positions."""
    read_everywhere: frozenset[str] = frozenset()
    """Of these log-probabilities, those that are read whatever the advantage; others may be placeholders where it is 0.
    """
    masks: tuple[str, ...] = ()
    """Optional inputs of 0 and 1 that select positions; without one, a datum's positions are all selected."""
    multi: frozenset[str] = frozenset()
    """Inputs that may, together, have shape [N, K]: K targets per position."""
    overrides: tuple[str, ...] = ()
    """Optional inputs that override the setting of the same name per position."""
    optional: tuple[str, ...] = (MASK, TEMPERATURE)
    """All inputs that a datum may omit."""


@dataclass(frozen=True, slots=True)
class ResolvedLoss:
    """What a loss reads under the settings of one request."""

    spec: LossSpec
    config: dict[str, float]
    """All settings, with defaults filled in."""
    required: tuple[str, ...]
    """Inputs that every datum must have."""
    defaults: dict[str, float]
    """Optional inputs that are read -> their values for datums that omit them."""


def resolve_loss(name: str, config: Mapping[str, float]) -> ResolvedLoss:
    """Look a loss up and fill in its settings.

    Raises UnknownLoss, or UnknownField, NonFinite or OutOfRange, naming the setting.
    """
    if name not in LOSS_SPECS:
        near = get_close_matches(name, LOSS_SPECS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(LOSS_SPECS)}"
        raise UnknownLoss(f"no such loss: {name[:100]}; {hint}", field="loss_fn")
    spec = LOSS_SPECS[name]
    for setting, value in config.items():
        _check_setting(spec, setting, value)
    resolved = {key: setting.default for key, setting in spec.settings.items()} | dict(config)
    low, high = resolved.get(CLIP_LOW, 0.0), resolved.get(CLIP_HIGH, math.inf)
    if low > high:
        raise OutOfRange(
            f"clip_low_threshold {low:g} is above clip_high_threshold {high:g}; swap or change them.",
            field=f"loss_fn_config[{CLIP_LOW}]",
        )
    extra = tuple(key for key, setting in spec.required_with.items() if resolved[setting] > 0)
    thresholds = {key: resolved[key] for key in spec.overrides}
    defaults = thresholds | dict.fromkeys((*spec.masks, TEMPERATURE), 1.0)
    return ResolvedLoss(spec, resolved, spec.required + extra, defaults)


def _check_setting(spec: LossSpec, name: str, value: float) -> None:
    field = f"loss_fn_config[{name}]"
    if name not in spec.settings:
        known = ", ".join(spec.settings) or "none"
        raise UnknownField(f"{spec.name} has no such setting; it takes: {known}.", field=field)
    if not math.isfinite(value):
        raise NonFinite("must be a finite number.", field=field)
    if value < spec.settings[name].minimum:
        raise OutOfRange(f"must be at least {spec.settings[name].minimum:g}.", field=field)
    if value > _LARGEST:
        raise OutOfRange(f"must be at most {_LARGEST:g}.", field=field)


def _policy_loss(
    name: str,
    settings: Mapping[str, Setting],
    required_with: Mapping[str, str] | None = None,
    masks: tuple[str, ...] = (),
    read_everywhere: tuple[str, ...] = (),
) -> LossSpec:
    required_with = required_with or {}
    overrides = tuple(setting for setting in (CLIP_LOW, CLIP_HIGH) if setting in settings)
    return LossSpec(
        name=name,
        required=("target_tokens", "logprobs", "advantages"),
        required_with=required_with,
        settings=settings,
        finite=frozenset({"logprobs", "advantages", TEMPERATURE, *required_with, *overrides}),
        nonpositive=frozenset({"logprobs", *required_with}),
        read_everywhere=frozenset({*read_everywhere, *required_with}),
        masks=masks,
        overrides=overrides,
        optional=(*required_with, *overrides, *masks, MASK, TEMPERATURE),
    )


def _clip(low: float, high: float) -> dict[str, Setting]:
    """Make thresholds on the probability ratio itself, not distances from 1."""
    return {CLIP_LOW: Setting(low), CLIP_HIGH: Setting(high)}


_CROSS_ENTROPY = LossSpec(
    name="cross_entropy",
    required=("target_tokens", "weights"),
    required_with={},
    settings={},
    finite=frozenset({"weights", TEMPERATURE}),
    nonpositive=frozenset(),
    multi=frozenset({"target_tokens", "weights"}),
)


LOSS_SPECS: Mapping[str, LossSpec] = {
    spec.name: spec
    for spec in (
        _CROSS_ENTROPY,
        _policy_loss("importance_sampling", {}),
        _policy_loss("ppo", _clip(0.8, 1.2)),
        _policy_loss("cispo", _clip(0.0, 4.0)),
        _policy_loss("dro", {"beta": Setting(0.05)}, read_everywhere=("logprobs",)),
        # Section 5.1 of arXiv 2507.18071: clipping ranges 3e-4 and 4e-4.
        _policy_loss("gspo", _clip(1 - 3e-4, 1 + 4e-4), masks=(SEQUENCE_RATIO_MASK,), read_everywhere=("logprobs",)),
        _policy_loss("grpo", {**_clip(0.8, 1.2), "kl_coef": Setting(0.0)}, {"reference_logprobs": "kl_coef"}),
    )
}
"""All losses, by name."""

"""The losses, their inputs and their settings. No torch: the service validates requests against these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import NonFinite, OutOfRange, UnknownField, UnknownLoss

MASK = "mask"
"""Loss input that every loss accepts: uint8, shape [N]; 0 excludes the position from loss, gradient and output."""

TEMPERATURE = "temperature"
"""Loss input that every loss accepts: float32, shape [N], above 0; the position's logits are divided by it."""

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
    masks: tuple[str, ...] = ()
    """Optional inputs of 0 and 1 that select positions; without one, a datum's positions are all selected."""
    multi: frozenset[str] = frozenset()
    """Inputs that may, together, have shape [N, K]: K targets per position."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Optional inputs that override the setting of the same name per position."""
        return tuple(name for name in (CLIP_LOW, CLIP_HIGH) if name in self.settings)

    @property
    def optional(self) -> tuple[str, ...]:
        """Inputs that a datum may omit."""
        return (*self.required_with, *self.overrides, *self.masks, MASK, TEMPERATURE)

    def resolve_config(self, config: Mapping[str, float]) -> dict[str, float]:
        """Fill in defaults. Raises UnknownField, NonFinite or OutOfRange, naming the setting."""
        for name, value in config.items():
            _check_setting(self, name, value)
        resolved = {name: setting.default for name, setting in self.settings.items()} | dict(config)
        low, high = resolved.get(CLIP_LOW, 0.0), resolved.get(CLIP_HIGH, math.inf)
        if low > high:
            raise OutOfRange(
                f"clip_low_threshold {low:g} is above clip_high_threshold {high:g}; swap or change them.",
                field=f"loss_fn_config.{CLIP_LOW}",
            )
        return resolved

    def required_inputs(self, config: Mapping[str, float]) -> tuple[str, ...]:
        """Return the inputs that every datum must have under a resolved `config`."""
        extra = tuple(name for name, setting in self.required_with.items() if config[setting] > 0)
        return self.required + extra

    def fills(self, config: Mapping[str, float]) -> dict[str, float]:
        """Return the optional inputs that are read, each with its value for datums that omit it."""
        thresholds = {name: config[name] for name in self.overrides}
        return thresholds | dict.fromkeys((*self.masks, TEMPERATURE), 1.0)


def _check_setting(spec: LossSpec, name: str, value: float) -> None:
    field = f"loss_fn_config.{name}"
    if name not in spec.settings:
        known = ", ".join(spec.settings) or "none"
        raise UnknownField(f"{spec.name} has no such setting; it takes: {known}.", field=field)
    if not math.isfinite(value):
        raise NonFinite("must be a finite number.", field=field)
    if value < spec.settings[name].minimum:
        raise OutOfRange(f"must be at least {spec.settings[name].minimum:g}.", field=field)


def _policy_loss(
    name: str,
    settings: Mapping[str, Setting],
    required_with: Mapping[str, str] | None = None,
    masks: tuple[str, ...] = (),
) -> LossSpec:
    optional = required_with or {}
    return LossSpec(
        name=name,
        required=("target_tokens", "logprobs", "advantages"),
        required_with=optional,
        settings=settings,
        finite=frozenset(
            {"logprobs", "advantages", TEMPERATURE, *optional, *({CLIP_LOW, CLIP_HIGH} & settings.keys())}
        ),
        nonpositive=frozenset({"logprobs", *optional}),
        masks=masks,
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
        _policy_loss("dro", {"beta": Setting(0.05)}),
        # Section 5.1 of arXiv 2507.18071: clipping ranges 3e-4 and 4e-4.
        _policy_loss("gspo", _clip(1 - 3e-4, 1 + 4e-4), masks=(SEQUENCE_RATIO_MASK,)),
        _policy_loss("grpo", {**_clip(0.8, 1.2), "kl_coef": Setting(0.0)}, {"reference_logprobs": "kl_coef"}),
    )
}
"""All losses, by name."""


def loss_spec(name: str) -> LossSpec:
    """Look a loss up. Raises UnknownLoss."""
    if name not in LOSS_SPECS:
        raise UnknownLoss(f"no such loss; choose one of {', '.join(LOSS_SPECS)}.", field="loss_fn")
    return LOSS_SPECS[name]

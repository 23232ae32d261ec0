"""The losses, per token. The engine sums them over all tokens and datums according to the request's `reduction`.

lp is the learner's log-probability of the target token, q the sampler's (`logprobs`), A the advantage, r = exp(lp - q).
These functions receive only counted positions, sequence after sequence. Settings and their defaults are in
`LOSS_SPECS`; the thresholds low and high may also be inputs, one value per position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer_service.engine_link.loss_specs import CLIP_HIGH, CLIP_LOW, SEQUENCE_RATIO_MASK


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss at each of K counted positions."""

    loss: Tensor
    """float32, shape [K], differentiable in lp."""
    means: dict[str, Tensor]
    """Statistics to average over tokens: name -> shape [K], detached."""
    advantage_means: dict[str, Tensor] = field(default_factory=dict)
    """Statistics to average over the positions whose advantage is not 0: name -> shape [K], detached, 0 elsewhere.

    A position without an advantage may hold any placeholder as the sampler's log-probability.
    """


LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], TokenLoss]
"""(lp [K] float32, inputs of shape [K] and `SEQUENCE_LENGTHS`, resolved settings) -> TokenLoss."""

SEQUENCE_LENGTHS = "sequence_lengths"
"""Input that packing adds: int64, shape [S], counted positions in each sequence, K in all, none of them 0."""


def cross_entropy(lp: Tensor, inputs: Mapping[str, Tensor], _config: Mapping[str, float]) -> TokenLoss:
    """-lp * weights. Weights may be negative: -dC/dlp as weights gives the gradient of any client-side loss C.

    For lp and weights of shape [K, M], with M targets per position, the loss is summed over the targets.
    """
    weights = inputs["weights"]
    return TokenLoss((-_where(weights != 0, lp) * weights).reshape(len(lp), -1).sum(1), {})


def importance_sampling(lp: Tensor, inputs: Mapping[str, Tensor], _config: Mapping[str, float]) -> TokenLoss:
    """-r A, the policy gradient corrected for the sampler's distribution."""
    log_ratio, advantages = lp - inputs["logprobs"], inputs["advantages"]
    ratio = _where(advantages != 0, log_ratio).exp()
    return TokenLoss(-ratio * advantages, {}, _ratios(log_ratio, advantages))


def ppo(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-min(r A, clamp(r, low, high) A), PPO's clipped surrogate (arXiv 1707.06347, eq. 7).

    The minimum applies for either sign of A: a token with A < 0 is pushed down while r > low. clip_fraction counts
    positions where clipping removes the gradient.
    """
    log_ratio = lp - inputs["logprobs"]
    loss, clipped = _surrogate(log_ratio, inputs, config)
    return TokenLoss(loss, {}, _ratios(log_ratio, inputs["advantages"], clipped))


def cispo(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-stop_gradient(clamp(r, low, high)) lp A (arXiv 2506.13585): clipped tokens keep a gradient, unlike PPO's.

    clip_fraction counts positions whose ratio is outside the thresholds.
    """
    advantages = inputs["advantages"]
    log_ratio = _where(advantages != 0, (lp - inputs["logprobs"]).detach())
    ratio = log_ratio.exp()
    weight = _clamp(ratio, inputs, config)
    loss = -weight * _where(advantages != 0, lp) * advantages
    return TokenLoss(loss, {}, _ratios(log_ratio, advantages, weight != ratio))


def dro(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-(lp A - beta/2 (lp - q)^2), direct reward optimisation: a quadratic pull towards q (arXiv 2405.19107)."""
    log_ratio, advantages = lp - inputs["logprobs"], inputs["advantages"]
    squared = log_ratio.square()
    means = {"squared_log_ratio": squared.detach()}
    return TokenLoss(0.5 * config["beta"] * squared - lp * advantages, means, _ratios(log_ratio, advantages))


def gspo(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-min(s' A, clamp(s', low, high) A) with the sequence's ratio s' = s exp(lp - stop_gradient(lp)).

    GSPO-token, eq. 13 and 14 of arXiv 2507.18071; if the advantages within a sequence are equal it is GSPO, eq. 5.
    s = exp(mean of lp - q) over the sequence's positions where `sequence_ratio_mask` is not 0, or over all of them
    without a mask. s gets no gradient: s' has the value of s, and the derivative s with respect to its own lp. The
    statistic `sequence_ratio` is s.
    """
    log_ratio = (lp - inputs["logprobs"]).detach()
    log_sequence_ratio = _sequence_means(log_ratio, inputs.get(SEQUENCE_RATIO_MASK), inputs[SEQUENCE_LENGTHS])
    loss, clipped = _surrogate(log_sequence_ratio + (lp - lp.detach()), inputs, config)
    means = {"sequence_ratio": log_sequence_ratio.exp()}
    return TokenLoss(loss, means, _ratios(log_ratio, inputs["advantages"], clipped))


def grpo(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-min(r A, clamp(r, low, high) A) + kl_coef k3, GRPO (arXiv 2402.03300, eq. 3 and 4).

    k3 = exp(ref - lp) - (ref - lp) - 1 with ref = `reference_logprobs`, which is read only if kl_coef > 0, and then
    at every counted position, whatever its advantage.
    """
    policy = ppo(lp, inputs, config)
    if config["kl_coef"] == 0.0:
        return policy
    log_ratio = inputs["reference_logprobs"] - lp
    kl = log_ratio.expm1() - log_ratio
    return TokenLoss(policy.loss + config["kl_coef"] * kl, {"reference_kl": kl.detach()}, policy.advantage_means)


LOSSES: Mapping[str, LossFunction] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo, grpo)
}
"""One function for each entry of LOSS_SPECS."""


def _surrogate(log_ratio: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clamp(r, low, high) A) with r = exp(log_ratio), and where it is clipped (bool).

    The clip applies where A > 0 and r > high, or A < 0 and r < low: the loss is constant there.
    """
    advantages, (low, high) = inputs["advantages"], _thresholds(inputs, config)
    ratio = log_ratio.detach().exp()
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bound = torch.where(advantages > 0, high, low)
    ratio = _where((advantages != 0) & ~clipped, log_ratio).exp()
    return -torch.where(clipped, bound, ratio) * advantages, clipped


def _where(used: Tensor, values: Tensor) -> Tensor:
    """Return the values where they are used and 0 elsewhere.

    An unused value that is infinite, or whose exp is, would otherwise make the loss or its derivative 0 * inf, which is
    NaN.
    """
    return torch.where(used, values, 0.0)


def _clamp(ratio: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    low, high = _thresholds(inputs, config)
    return ratio.clamp(min=low).clamp(max=high)


def _thresholds(inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return the clip thresholds, per position or as scalars for all positions."""
    like = inputs["advantages"]
    low, high = (
        torch.as_tensor(inputs.get(name, config[name]), dtype=like.dtype, device=like.device)
        for name in (CLIP_LOW, CLIP_HIGH)
    )
    return low, high


def _sequence_means(values: Tensor, mask: Tensor | None, lengths: Tensor) -> Tensor:
    """Return, at each position, the mean of `values` over its sequence's positions where the mask is not 0."""
    # Reduces by segment and not with index_add, whose order differs from call to call on a GPU.
    chosen = torch.ones_like(values) if mask is None else (mask != 0).to(values)
    parts = (_where(chosen != 0, values), chosen)
    total, count = (torch.segment_reduce(x.double(), "sum", lengths=lengths) for x in parts)
    return (total / count).to(values).repeat_interleave(lengths)


def _ratios(log_ratio: Tensor, advantages: Tensor, clipped: Tensor | None = None) -> dict[str, Tensor]:
    """Return the ratio, the k3 estimate of KL(sampler || learner), r - 1 - log r, and what is clipped.

    All at the positions that have an advantage, which are the sampler's tokens.
    """
    chosen = advantages != 0
    log_ratio = _where(chosen, log_ratio.detach())
    means = {"ratio": _where(chosen, log_ratio.exp()), "kl": log_ratio.expm1() - log_ratio}
    return means if clipped is None else means | {"clip_fraction": (clipped & chosen).float()}

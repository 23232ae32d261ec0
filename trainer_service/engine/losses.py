"""The losses, per token. The engine sums them over all tokens and datums: no mean, no length normalisation.

lp is the learner's log-probability of the target token, q the sampler's (`logprobs`), A the advantage, r = exp(lp - q).
Only counted positions arrive here. Settings, with their defaults, are in `loss_specs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss at each of K counted positions."""

    loss: Tensor
    """float32, shape [K], differentiable in lp."""
    means: dict[str, Tensor]
    """Statistics to average over tokens: name -> shape [K], detached."""


LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], TokenLoss]
"""(lp [K] float32, inputs of shape [K], resolved settings) -> TokenLoss."""


def cross_entropy(lp: Tensor, inputs: Mapping[str, Tensor], _config: Mapping[str, float]) -> TokenLoss:
    """-lp * weights. Weights may be negative: -dC/dlp as weights gives the gradient of any client-side loss C."""
    return TokenLoss(-lp * inputs["weights"], {})


def importance_sampling(lp: Tensor, inputs: Mapping[str, Tensor], _config: Mapping[str, float]) -> TokenLoss:
    """-r A, the policy gradient corrected for the sampler's distribution."""
    log_ratio = lp - inputs["logprobs"]
    return TokenLoss(-log_ratio.exp() * inputs["advantages"], _ratio_means(log_ratio))


def ppo(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-min(r A, clamp(r, low, high) A), PPO's clipped surrogate (arXiv 1707.06347, eq. 7).

    The minimum holds for either sign of A: a token with A < 0 is pushed down while r > low. clip_fraction counts
    positions where the clip takes the gradient away.
    """
    log_ratio = lp - inputs["logprobs"]
    ratio, advantages = log_ratio.exp(), inputs["advantages"]
    plain, clipped = ratio * advantages, _clamp(ratio, config) * advantages
    means = _ratio_means(log_ratio) | {"clip_fraction": (clipped < plain).float()}
    return TokenLoss(-torch.minimum(plain, clipped), means)


def cispo(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-stop_gradient(clamp(r, low, high)) lp A (arXiv 2506.13585): clipped tokens keep a gradient, unlike PPO's.

    clip_fraction counts positions whose ratio lies outside the thresholds.
    """
    log_ratio = (lp - inputs["logprobs"]).detach()
    ratio = log_ratio.exp()
    weight = _clamp(ratio, config)
    means = _ratio_means(log_ratio) | {"clip_fraction": (weight != ratio).float()}
    return TokenLoss(-weight * lp * inputs["advantages"], means)


def dro(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-(lp A - beta/2 (lp - q)^2), direct reward optimisation: a quadratic pull to the sampler (arXiv 2405.19107)."""
    log_ratio = lp - inputs["logprobs"]
    penalty = 0.5 * config["beta"] * log_ratio.square()
    means = _ratio_means(log_ratio) | {"squared_log_ratio": log_ratio.detach().square()}
    return TokenLoss(penalty - lp * inputs["advantages"], means)


def grpo(lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """-min(r A, clamp(r, low, high) A) + kl_coef k3, GRPO (arXiv 2402.03300, eq. 3 and 4).

    k3 = exp(ref - lp) - (ref - lp) - 1 with ref = `reference_logprobs`, which is read when kl_coef > 0.
    """
    policy = ppo(lp, inputs, config)
    if config["kl_coef"] == 0.0:
        return policy
    log_ratio = inputs["reference_logprobs"] - lp
    kl = log_ratio.expm1() - log_ratio
    return TokenLoss(policy.loss + config["kl_coef"] * kl, policy.means | {"reference_kl": kl.detach()})


LOSSES: Mapping[str, LossFunction] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, grpo)
}
"""One function for each entry of LOSS_SPECS."""


def _clamp(ratio: Tensor, config: Mapping[str, float]) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _ratio_means(log_ratio: Tensor) -> dict[str, Tensor]:
    """Mean ratio, and the k3 estimate of KL(sampler || learner), r - 1 - log r, on the sampler's tokens."""
    log_ratio = log_ratio.detach()
    return {"ratio": log_ratio.exp(), "kl": log_ratio.expm1() - log_ratio}

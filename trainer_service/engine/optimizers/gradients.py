"""The norm of a run's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.nn.utils import get_total_norm

from paceline.errors import NonFiniteGradient


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the Euclidean norm of the whole gradient. Raises NonFiniteGradient."""
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]).item()
    if not math.isfinite(norm):
        raise NonFiniteGradient(
            "the gradient held NaN or infinity and was dropped; look at the batch's logprobs, advantages and weights."
        )
    return norm

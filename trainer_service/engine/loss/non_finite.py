"""Count NaN and infinity in losses and gradients, and refuse them if the request asks for that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils import get_total_norm

from paceline.errors import NonFiniteLoss


def count_non_finite(gradients: Sequence[Tensor | None]) -> int:
    """Count the elements that are NaN or infinite."""
    present = [gradient for gradient in gradients if gradient is not None]
    # The norm takes one pass over the gradients and usually suffices.
    if not present or math.isfinite(get_total_norm(present).item()):
        return 0
    return sum(int(gradient.isfinite().logical_not().sum()) for gradient in present)


def refuse_non_finite(positions: int, elements: int) -> None:
    """Raise NonFiniteLoss if the loss at any position, or any element of the gradient, is NaN or infinite."""
    if positions or elements:
        raise NonFiniteLoss(
            f"the loss is NaN or infinite at {positions} positions, its gradient in {elements} elements; "
            "nothing was added: look at the batch's logprobs, advantages and weights.",
            metadata={"positions": str(positions), "gradient_elements": str(elements)},
        )

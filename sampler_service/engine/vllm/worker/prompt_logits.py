"""The logits of prompts, each token's with its own request's adapter on the output head.

vLLM computes a step's logits twice: of the tokens that the next ones are sampled from, and of prompts whose
log-probabilities were asked for. It knows the adapter of each row of the first kind only, and takes the rows of the
second for those: a prompt in a batch with an adapter on the head is scored with another request's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class PromptLogits:
    """Stands between vLLM's model runner, of which there are two, and the operator of the output head."""

    def __init__(self, model_runner: Any, head: Any) -> None:
        """Take the runner, and the operators of the output head's adapters (vLLM's punica wrapper)."""
        self._tokens: Tensor | None = None
        """The step's hidden states while prompts are scored: [T, hidden]."""
        self._first = 0
        """The row of these that the logits begin with."""
        self._head = head
        self._add_sampled: Callable[..., Any] = head.add_lora_logits
        self._compute: Callable[..., Any] = model_runner.model.compute_logits
        head.add_lora_logits = self._add
        model_runner.model.compute_logits = self._compute_logits
        worker = getattr(model_runner, "prompt_logprobs_worker", None)
        if worker is None:
            self._surround(model_runner, "_get_prompt_logprobs_dict", 0)
        else:
            self._surround(worker, "compute_prompt_logprobs", 1)
            self._surround(worker, "compute_prompt_token_id_logprobs", 1)

    def _surround(self, owner: Any, name: str, place: int) -> None:
        score = getattr(owner, name)

        def surrounded(*values: Any) -> Any:
            self._tokens = values[place]
            try:
                return score(*values)
            finally:
                self._tokens = None

        setattr(owner, name, surrounded)

    def _compute_logits(self, hidden: Tensor, *values: Any) -> Any:
        if self._tokens is not None:
            self._first = _first_row(hidden, self._tokens)
        return self._compute(hidden, *values)

    def _add(self, y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, **options: Any) -> Any:
        """Add B A x to the logits in place.

        Shapes: y [N, V or more], x [N, hidden], A [slots, 1, r, hidden], B [slots, 1, V, r].
        """
        if self._tokens is None:
            return self._add_sampled(y, x, lora_a, lora_b, scale, **options)
        slots = self._head.token_lora_indices[self._first : self._first + len(x)]
        width = min(y.shape[1], lora_b.shape[-2])
        for slot in sorted(set(slots.tolist()) - {-1}):
            rows = (slots == slot).nonzero()[:, 0]
            delta = x[rows] @ lora_a[slot, 0].T @ lora_b[slot, 0, :width].T
            y[:, :width].index_add_(0, rows, delta.to(y.dtype), alpha=scale)
        return y


def _first_row(part: Tensor, whole: Tensor) -> int:
    """Return where rows that were cut from a matrix begin in it."""
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        raise RuntimeError("vLLM scores prompts from other hidden states than the step's")
    return (part.storage_offset() - whole.storage_offset()) // whole.stride(0)

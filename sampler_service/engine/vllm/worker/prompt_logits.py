"""Computes the logits of prompts with each token's own adapter on the output head.

vLLM computes logits twice in a step: for the positions to sample from, and for prompts whose log-probabilities were
requested. It maps only rows of the first kind to adapters, and uses that mapping for the second kind too. So a prompt
in a batch with an adapter on the head would be scored with another request's adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from vllm.lora.layers import LogitsProcessorWithLoRA


def score_prompts_by_token(model_runner: Any, layers: Iterable[Any]) -> None:
    """Make prompts be scored with the adapter of each token's own request, if the output head may have adapters."""
    for layer in layers:
        if isinstance(layer, LogitsProcessorWithLoRA):
            PromptLogits(model_runner, layer.punica_wrapper)


class PromptLogits:
    """Wraps the output head's LoRA operator, and the prompt scoring of either of vLLM's two model runners."""

    def __init__(self, model_runner: Any, head: Any) -> None:
        """`head` has the LoRA operators of the output head (vLLM's punica wrapper)."""
        self._tokens: Tensor | None = None
        """The step's hidden states [T, hidden] while prompts are scored; otherwise None."""
        self._first = 0
        """First row of the hidden states whose logits are being computed."""
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
    """Return the index in `whole` of the first row of `part`, a slice of its rows."""
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        raise RuntimeError("vLLM scores prompts from other hidden states than the step's")
    return (part.storage_offset() - whole.storage_offset()) // whole.stride(0)

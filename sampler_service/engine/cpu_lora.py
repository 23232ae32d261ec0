"""LoRA on vLLM's CPU backend: one pair of GEMMs per adapter in the batch.

vLLM's own CPU operators copy the matrices A and B for every single token before they multiply, which makes a prefill
with an adapter many times slower than one without. They also take tokens without an adapter for tokens of the last slot
while decoding, so that requests to the base model are answered with somebody's adapter once all slots are in use.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

Groups = list[tuple[int, Tensor | None]]
"""Slot of an adapter and the rows that use it; None means all rows. Rows without an adapter are in no group."""


def group_rows(slots: Tensor) -> Groups:
    """Group the rows of a batch by slot; `slots` has shape [T], -1 for no adapter."""
    present = sorted(set(slots.tolist()))
    if len(present) == 1:
        return [(present[0], None)] if present[0] >= 0 else []
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in present if slot >= 0]


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """Replaces the operators of linear layers, the output head and the embedding.

    Products are rounded where vLLM's operators round them: A x once to the weights' dtype, B A x once more. Within a
    product the CPU's GEMM accumulates in float32.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_groups: Groups = []
        self._sampler_groups: Groups = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Take over the batch's mapping; called before each step whose mapping differs from the last one's."""
        super().update_metadata(*args, **kwargs)
        self._token_groups = group_rows(self.token_lora_indices)
        self._sampler_groups = group_rows(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add B A x to slices of y in place.

        Shapes: y [T, sum of slices], x [T, in], A [slots, 1, r, in], B [slots, 1, slice, r].
        """
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._token_groups:
            part, offset = x if rows is None else x[rows], 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                _add_rows(y.narrow(1, offset, width), rows, part @ a[slot, 0].T, b[slot, 0, :width], scale)
                offset += width

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
    ) -> None:
        """Add B A x to the logits in place.

        Shapes: y [T, V or more], x [T, in], A [slots, 1, r, in], B [slots, 1, V, r].
        """
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        width = min(y.shape[1], lora_b_stacked.shape[-2])
        for slot, rows in self._sampler_groups:
            part = x if rows is None else x[rows]
            _add_rows(
                y.narrow(1, 0, width), rows, part @ lora_a_stacked[slot, 0].T, lora_b_stacked[slot, 0, :width], scale
            )

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        """Add B x to y in place, or put it there without `add_inputs`; x holds rows of A.

        Shapes: y [T, out], x [T, r], B [slots, 1, out, r].
        """
        if not add_inputs:
            y.zero_()
        for slot, rows in self._token_groups:
            _add_rows(y, rows, x if rows is None else x[rows], lora_b_stacked[slot, 0], 1.0)


def _add_rows(y: Tensor, rows: Tensor | None, shrunk: Tensor, b: Tensor, scale: float) -> None:
    delta = (shrunk @ b.T).to(y.dtype)
    if rows is None:
        y.add_(delta, alpha=scale)
    else:
        y.index_add_(0, rows, delta, alpha=scale)


class GroupedLoraCpuWorker(CPUWorker):
    """vLLM's CPU worker with these operators; chosen through `worker_cls`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; its LoRA layers ask the platform for their operators."""
        name = f"{GroupedPunicaWrapper.__module__}.{GroupedPunicaWrapper.__name__}"
        current_platform.get_punica_wrapper = lambda: name  # type: ignore[method-assign]
        super().load_model(*args, **kwargs)

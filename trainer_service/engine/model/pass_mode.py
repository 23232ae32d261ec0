"""Modes of running sequences through a base model: packed in one row, or one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from paceline.errors import Unsupported
from paceline.types import PackingMode
from trainer_service.engine.model.fused.swap import has_fused_family
from trainer_service.engine.model.packed_attention import PACKED_ATTENTION

STOCK_ATTENTION = "eager"
"""transformers' own attention, written as its formula: it includes whatever a model adds to attention."""


@dataclass(frozen=True, slots=True)
class PassMode:
    """One way to compute a model's passes."""

    packing: PackingMode
    attention: str
    """Name of the attention implementation."""
    fused: bool = False
    """Whether the layers of known families are replaced by fused ones."""
    own_logits: bool = False
    """Whether the model computes all logits of a sequence itself, for instance because it scales or caps them."""

    @property
    def is_packed(self) -> bool:
        return self.packing is PackingMode.PACKED

    def __str__(self) -> str:
        sequences = "packed" if self.is_packed else "one sequence a pass"
        extra = f"{', fused layers' if self.fused else ''}{', its own logits' if self.own_logits else ''}"
        return f"{sequences}, attention {self.attention}{extra}"


FASTEST = PassMode(PackingMode.PACKED, PACKED_ATTENTION, fused=True)
"""The mode that is tried first."""
_OTHERS = (
    PassMode(PackingMode.PACKED, PACKED_ATTENTION),
    PassMode(PackingMode.ONE_SEQUENCE, "sdpa"),
    PassMode(PackingMode.ONE_SEQUENCE, STOCK_ATTENTION),
    PassMode(PackingMode.ONE_SEQUENCE, "sdpa", own_logits=True),
    PassMode(PackingMode.ONE_SEQUENCE, STOCK_ATTENTION, own_logits=True),
)


def modes_of(model: PreTrainedModel) -> tuple[PassMode, ...]:
    """Return the modes that may work for a model, the fastest first."""
    return (FASTEST, *_OTHERS) if has_fused_family(model) else _OTHERS


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switch a model to an attention implementation; of a model with several parts, only its language model.

    Raises Unsupported if the model does not support it.
    """
    part = model.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(part, PreTrainedModel) or part.config is model.config:
        part = model
    try:
        part.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise Unsupported(f"{type(model).__name__} does not take attention {name}.") from error
    if part.config._attn_implementation != name:  # noqa: SLF001 - there is no other way to ask
        raise Unsupported(f"{type(model).__name__} computes attention by itself.")

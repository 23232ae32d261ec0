"""The cases that `python -m bench.train` measures with each model, and their budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A model's measurements, and the budgets that the trainer must meet."""

    datums: int
    """Sequences in a batch."""
    times_faster: Mapping[str, float]
    """Arm -> budget."""
    also: tuple[str, ...] = ()
    """Arms without a budget."""
    pack_tokens: int = 4096
    shape: str = ""
    """The model's shape; by default that of the case's name."""
    length: int | None = None
    """Length of every sequence, all of it labelled; by default lengths differ, and half is labelled."""
    least_tokens: float | None = None
    """Fewest tokens a second."""
    least_share: float | None = None
    """Smallest share of the rate of square products."""

    @property
    def arms(self) -> tuple[str, ...]:
        return (*self.times_faster, *self.also)


ON_CPU = {
    "padded float32": 7.0,
    "padded bfloat16": 3.5,
    "one at a time, checkpointed": 3.0,
    "TRL SFT, padding-free": 1.5,
    "TRL GRPO, one at a time": 1.5,
}
# Memory holds eight rows of up to 1,024 tokens beside 8 billion weights.
ON_GPU = {"TRL SFT, padded, 8 rows": 1.5, "TRL GRPO, padded, 8 rows": 1.5}
CASES = {
    # As many datums as fit in 24 GiB: the padded arms hold the logits several times.
    "smollm2": Case(4, ON_CPU, ("one at a time",)),
    "qwen2.5-0.5b": Case(2, ON_CPU, ("one at a time",), least_share=0.4),
    "llama-8b": Case(
        28, ON_GPU, ("padded bfloat16, 8 rows", "TRL SFT, padding-free"), pack_tokens=8192, least_share=0.45
    ),
    # NeMo AutoModel's shape, and its figure on one H100: 2 sequences of 4,096 tokens, of which every position counts.
    "llama-8b, full": Case(
        2, {}, ("TRL SFT, padding-free",), pack_tokens=8192, shape="llama-8b", length=4096, least_tokens=12_473
    ),
}
FOR_DEVICE = {"cpu": ("smollm2", "qwen2.5-0.5b"), "cuda": ("llama-8b", "llama-8b, full")}

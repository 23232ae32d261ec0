"""A sampling request, decoded but not yet validated."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.types import ModelRef, SamplingParams
from paceline.types.training import Array


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Completions of one prompt."""

    ref: ModelRef
    prompt: Array
    """int32 or int64, shape [P]."""
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0

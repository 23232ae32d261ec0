"""Log-probabilities of target tokens, a chunk of positions at a time, so that the batch's logits never exist."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def target_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Compute log softmax(head(hidden))[targets] in float32.

    `hidden` is [K, hidden_size], `targets` int64 [K], or [K, M] for M targets per position; returns a tensor of the
    targets' shape, differentiable in `hidden` and in the head's parameters (a LoRA adapter on the head among them). At
    no time, forward or backward, are there logits of more than `chunk` positions: the backward pass computes them
    again.
    """
    parts = [
        checkpoint(_chunk_logprobs, head, h, t, use_reentrant=False)
        for h, t in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    ]
    return torch.cat(parts)


def _chunk_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits: Tensor = head(hidden).float()
    chosen = logits.gather(1, targets.reshape(len(targets), -1)) - logits.logsumexp(1, keepdim=True)
    return chosen.reshape(targets.shape)

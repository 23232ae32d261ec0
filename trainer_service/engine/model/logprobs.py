"""Log-probabilities of target tokens, a chunk of positions at a time: the whole batch's logits never exist at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.utils.checkpoint import checkpoint

from trainer_service.engine.model.lora_linear import AdaptedLinear, Span, clip


def target_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    chunk: int,
    spans: Sequence[Span] = (),
    temperatures: Tensor | None = None,
) -> Tensor:
    """Compute log softmax(head(hidden) / temperatures)[targets] in float32.

    `hidden` is [K, hidden_size], `targets` int64 [K], or [K, M] for M targets per position. Returns a tensor of the
    targets' shape, differentiable in `hidden` and in the head's parameters, including LoRA adapters on the head.
    Logits of more than `chunk` positions never exist at once, forward or backward. `spans` assigns positions to runs;
    `temperatures` are float32 [K], None meaning 1.
    """
    rows = _even(len(hidden), chunk)
    parts = list(zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True))
    chunk_temperatures = [None] * len(parts) if temperatures is None else list(torch.split(temperatures, rows))
    # Several targets per position would need one derivative each.
    frozen = _frozen_linear(head, spans) if targets.ndim == 1 else None
    if frozen is not None:
        chunks = zip(parts, chunk_temperatures, strict=True)
        return torch.cat([_FrozenHead.apply(h, t, w, frozen) for (h, t), w in chunks])  # type: ignore[no-untyped-call]
    ends = accumulate(len(h) for h, _ in parts)
    return torch.cat(
        [
            checkpoint(_chunk_logprobs, head, h, t, w, clip(spans, end - len(h), end), use_reentrant=False)
            for (h, t), w, end in zip(parts, chunk_temperatures, ends, strict=True)
        ]
    )


def _even(rows: int, chunk: int) -> int:
    """Shrink a chunk so that all are about equal: a last one of few rows would still read all the weights."""
    return math.ceil(rows / max(1, math.ceil(rows / chunk))) or chunk


def has_adapter(head: nn.Module, run_id: str) -> bool:
    """Return whether a run has an adapter on the head."""
    return isinstance(head, AdaptedLinear) and run_id in head.lora_A


def _frozen_linear(head: nn.Module, spans: Sequence[Span]) -> nn.Linear | None:
    """Return the head as a linear layer if it is one and none of the runs trains any of it, else None."""
    if isinstance(head, AdaptedLinear) and not any(has_adapter(head, span.run_id) for span in spans):
        head = head.base_layer
    trained = any(parameter.requires_grad for parameter in head.parameters())
    return head if type(head) is nn.Linear and not trained else None


def _chunk_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, spans: Sequence[Span]
) -> Tensor:
    logits = head(hidden, spans) if isinstance(head, AdaptedLinear) else head(hidden)
    return chosen_logprobs(logits, targets, temperatures)


def chosen_logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Compute log softmax(logits / temperatures)[targets] in float32, for [K, vocabulary] and [K], or [K, M]."""
    logits = logits.float() if temperatures is None else logits.float() / temperatures[:, None]
    chosen = logits.gather(1, targets.reshape(len(targets), -1)) - logits.logsumexp(1, keepdim=True)
    return chosen.reshape(targets.shape)


class _FrozenHead(autograd.Function):
    """Log-probabilities under a frozen linear head, with the derivative taken while the logits exist.

    A position's logprob depends only on its own hidden state: d logprob / d hidden = (W[target] - softmax(logits) W)
    / temperature is one vector per position, whatever the loss. So the forward pass saves that, [K, hidden_size], and
    the backward pass scales it: nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, head: nn.Linear) -> Tensor:
        logits = head(hidden)
        logprobs = _log_softmax(logits, targets, temperatures, keep=ctx.needs_input_grad[0])
        if ctx.needs_input_grad[0]:
            slope = head.weight.index_select(0, targets).sub_(logits @ head.weight)
            ctx.save_for_backward(slope if temperatures is None else slope.div_(temperatures[:, None]))
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * gradients[0][:, None]).to(slope.dtype), None, None, None


def _log_softmax(logits: Tensor, targets: Tensor, temperatures: Tensor | None, *, keep: bool) -> Tensor:
    """Return log softmax(logits / temperatures)[targets] in float32; overwrite the logits by that softmax if `keep`.

    Float32 logits are overwritten in any case.
    """
    exact = logits.float()
    if temperatures is not None:
        exact /= temperatures[:, None]
    largest = exact.amax(1)
    chosen = exact.gather(1, targets[:, None]).squeeze(1)
    probabilities = torch.softmax(exact, dim=1)
    if keep:
        logits.copy_(probabilities)
    # The largest probability is 1 / sum(exp(logits - largest)), never too small for float32.
    return torch.sub(chosen, largest).add_(probabilities.amax(1).log_())

"""Sampling as pure functions on tensors. The filters and their order are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.types import SamplingParams, TopkLogprobs

GREEDY = 1e-5
"""Temperatures below this select the likeliest token."""

CHUNK = 256
"""Positions whose distributions are in memory in float32 at a time."""


def is_greedy(params: SamplingParams) -> bool:
    """Return whether the likeliest token is selected; filters and seed are then ignored."""
    return params.temperature < GREEDY


def processed_logprobs(logits: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """Return the log-probabilities of the distributions to sample from, float32, shape [B, V]; -inf where filtered out.

    `logits` has shape [B, V]. Row i is processed with `rows[i]`: temperature, then min_p, top_k and top_p, each applied
    to the tokens that the previous filter left. Greedy rows have temperature 1 and no filters.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    active = [None if is_greedy(row) else row for row in rows]
    logits = logits.float() / column([row.temperature if row else 1.0 for row in active])
    min_p = column([row.min_p if row else 0.0 for row in active])
    top_p = column([row.top_p if row else 1.0 for row in active])
    top_k = column([row.top_k if row and row.top_k else logits.shape[-1] for row in active]).long()
    if bool((min_p > 0).any()):
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if bool((top_p < 1).any()) or bool((top_k < logits.shape[-1]).any()):
        logits = _keep_top(logits, top_k.clamp(max=logits.shape[-1]), top_p)
    return logits.log_softmax(-1)


def _keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the k likeliest tokens (ties included), and of those the fewest that together reach probability p."""
    values, order = logits.sort(dim=-1, descending=True)
    values = values.masked_fill(values < values.gather(-1, top_k - 1), -torch.inf)
    probs = values.softmax(-1)
    values = values.masked_fill((probs.cumsum(-1) - probs >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(values).scatter_(-1, order, values)


def draw(logprobs: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """Draw one token per row, int64, shape [B], from log-probabilities of shape [B, V]; greedily if no generator.

    Each row uses only its own generator (argmax of p / Exp(1), the exponential race), so that a row's tokens do not
    depend on its neighbours.
    """
    scores = logprobs.clone()
    for i, generator in enumerate(generators):
        if generator is not None:
            noise = torch.empty(logprobs.shape[-1], dtype=torch.float32).exponential_(generator=generator)
            scores[i] -= noise.clamp_min(torch.finfo(torch.float32).tiny).log().to(logprobs.device)
    return scores.argmax(-1)


def topk_rows(logprobs: Tensor, k: int) -> TopkLogprobs:
    """Return the k likeliest tokens of each row of [N, V], padded with -1 and NaN if the filters left fewer."""
    values, ids = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    removed = values.isneginf()
    rows = TopkLogprobs(
        np.full((len(logprobs), k), -1, np.int32),
        np.full((len(logprobs), k), np.nan, np.float32),
    )
    rows.token_ids[:, : values.shape[1]] = ids.masked_fill(removed, -1).cpu().numpy()
    rows.logprobs[:, : values.shape[1]] = values.masked_fill(removed, torch.nan).cpu().numpy()
    return rows


def sequence_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, TopkLogprobs | None]:
    """Return each token's log-probability at temperature 1 (float32, shape [N], NaN at 0) and the k likeliest tokens.

    `logits` has shape [N, V]; row i predicts token i + 1. Row 0 of the likeliest tokens is empty.
    """
    out = torch.full((len(tokens),), torch.nan)
    topk = TopkLogprobs(np.full((len(tokens), k), -1, np.int32), np.full((len(tokens), k), np.nan, np.float32))
    for start in range(0, len(tokens) - 1, CHUNK):
        targets = tokens[start + 1 : start + 1 + CHUNK]
        logprobs = logits[start : start + len(targets)].float().log_softmax(-1)
        place = slice(start + 1, start + 1 + len(targets))
        out[place] = logprobs.gather(-1, targets[:, None])[:, 0].cpu()
        if k:
            rows = topk_rows(logprobs, k)
            topk.token_ids[place], topk.logprobs[place] = rows.token_ids, rows.logprobs
    return out, topk if k else None

"""Convert groups of scored sequences to datums.

A group holds the completions of one prompt: `tokens` (prompt and completion), `masks` (-100 where a token is not
trained), `scores`, `inference_logprobs` aligned with the tokens, `overrides`, `generation_params`, `group_overrides`.
The loss is GRPO's (docs/losses.md), averaged over each sequence's trained tokens and then over all sequences of the
batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.client.batching import MAX_DATUMS
from paceline.types import Datum
from paceline.types.training import Array

IGNORED = -100
"""Mask of a token that is not trained."""
_MIN_DEVIATION = 1e-8
_BYTES_PER_TOKEN = 32
"""Upper bound of an encoded datum's size per token."""
_MAX_BYTES = 3 << 20
"""Maximum size of one forward_backward, so that the client sends it as one request."""


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """A sequence to train on."""

    datum: Datum
    inference_logprobs: Array
    """float32, shape [N]: the sampler's log-probabilities of the targets; meaningful where `counted`."""
    counted: Array
    """bool, shape [N]: targets that are trained on."""
    advantage: float


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The sequences of one step."""

    sequences: tuple[ScoredSequence, ...]
    skipped: int
    """Number of sequences without the sampler's log-probabilities or without trained tokens."""


def make_batch(groups: Iterable[Mapping[str, Any]], seq_len: int) -> TrainingBatch:
    """Convert a batch. Raises ValueError for a group whose lists differ in length."""
    rows, skipped = [], 0
    for group in groups:
        advantages = group_advantages(group)
        for index in range(len(group["tokens"])):
            row = _row(group, index, advantages[index], seq_len)
            skipped += row is None
            rows += [row] if row else []
    return TrainingBatch(tuple(_sequence(row, len(rows)) for row in rows), skipped)


def group_advantages(group: Mapping[str, Any]) -> list[Array]:
    """Return each sequence's advantage, float64, shape [], or [tokens] if the group provides advantages.

    By default it is the score minus the group's mean, divided by the group's standard deviation; a group of one keeps
    its score. An override may set it to zero.
    """
    scores = np.array(group["scores"], np.float64)
    if len(scores) != len(group["tokens"]):
        raise ValueError(f"a group has {len(group['tokens'])} sequences and {len(scores)} scores")
    if len(scores) > 1:
        scores = (scores - scores.mean()) / max(float(scores.std()), _MIN_DEVIATION)
    own = group.get("advantages")
    found = [np.array(own[index] if own else score, np.float64) for index, score in enumerate(scores)]
    for index, override in enumerate(group.get("overrides") or ()):
        if override and override.get("set_advantage_to_zero"):
            found[index] = np.zeros_like(found[index])
    return found


def temperature_of(group: Mapping[str, Any], index: int) -> float:
    """Return a sequence's sampling temperature: its override's, generation_params', group_overrides', else 1."""
    overrides = group.get("overrides") or ()
    own = overrides[index] if index < len(overrides) else None
    for place in (own, group.get("generation_params"), group.get("group_overrides")):
        if place and place.get("temperature") is not None:
            temperature = float(place["temperature"])
            return temperature if temperature > 0 else 1.0
    return 1.0


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: Array
    targets: Array
    counted: Array
    logprobs: Array
    advantages: Array
    temperature: float


def _row(group: Mapping[str, Any], index: int, advantage: Array, seq_len: int) -> _Row | None:
    """Shift a sequence; return None if it cannot be trained on."""
    tokens, mask = np.array(group["tokens"][index], np.int64), np.array(group["masks"][index], np.int64)
    if tokens.shape != mask.shape or tokens.ndim != 1:
        raise ValueError(f"a sequence has {tokens.size} tokens and {mask.size} masks")
    logprobs = (group.get("inference_logprobs") or [[]] * len(group["tokens"]))[index]
    tokens, mask = tokens[: seq_len + 1], mask[: seq_len + 1]
    counted = mask[1:] != IGNORED
    if len(logprobs) < len(tokens) or not counted.any():
        return None
    every = np.broadcast_to(advantage, mask.shape) if advantage.ndim == 0 else advantage[: len(mask)]
    if every.shape != mask.shape:
        raise ValueError(f"a sequence has {mask.size} tokens and {every.size} advantages")
    return _Row(
        tokens[:-1],
        tokens[1:],
        counted,
        np.array(logprobs[1 : len(tokens)], np.float32),
        every[1:],
        temperature_of(group, index),
    )


def _sequence(row: _Row, sequences: int) -> ScoredSequence:
    """Build a datum whose loss, summed over tokens, is its share of the batch mean."""
    share = row.advantages / (row.counted.sum() * sequences)
    inputs = {
        "target_tokens": row.targets,
        "mask": row.counted.astype(np.uint8),
        "logprobs": np.where(row.counted, row.logprobs, 0.0).astype(np.float32),
        "advantages": np.where(row.counted, share, 0.0).astype(np.float32),
    }
    if row.temperature != 1.0:
        inputs["temperature"] = np.full(row.targets.shape, row.temperature, np.float32)
    advantage = float(row.advantages[row.counted].mean())
    return ScoredSequence(Datum(row.tokens.astype(np.int32), inputs), row.logprobs, row.counted, advantage)


def micro_batches(sequences: Sequence[ScoredSequence], size: int) -> list[list[ScoredSequence]]:
    """Split a batch into calls of at most `size` sequences, each small enough to be one command.

    The split is deterministic.
    """
    calls: list[list[ScoredSequence]] = []
    room = 0
    for sequence in sequences:
        cost = _BYTES_PER_TOKEN * len(sequence.counted)
        if not calls or len(calls[-1]) == min(size, MAX_DATUMS) or cost > room:
            calls.append([])
            room = _MAX_BYTES
        calls[-1].append(sequence)
        room -= cost
    return calls


def logprob_metrics(sequences: Sequence[ScoredSequence], outputs: Sequence[Array]) -> dict[str, float]:
    """Compare the trainer's and the sampler's log-probabilities of the trained tokens."""
    trained = np.concatenate([output[each.counted] for each, output in zip(sequences, outputs, strict=True)])
    sampled = np.concatenate([each.inference_logprobs[each.counted] for each in sequences])
    difference = trained.astype(np.float64) - sampled
    means = {
        sign: [
            float(output[each.counted].mean())
            for each, output in zip(sequences, outputs, strict=True)
            if (each.advantage > 0) == (sign == "pos")
        ]
        for sign in ("pos", "neg")
    }
    return {
        "alignment/diff_mean": float(difference.mean()),
        "alignment/diff_abs_mean": float(np.abs(difference).mean()),
        "alignment/diff_max": float(np.abs(difference).max()),
        "logprobs/training_mean": float(trained.mean()),
        "logprobs/inference_mean": float(sampled.mean()),
        **{f"{sign}_logp": float(np.mean(values)) for sign, values in means.items() if values},
    }

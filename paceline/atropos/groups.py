"""Convert groups of scored sequences to datums.

A group holds the completions of one prompt: `tokens` (prompt and completion), `masks` (-100 where a token is not
trained), `scores`, `inference_logprobs` aligned with the tokens, `overrides`, `generation_params`, `group_overrides`.
The loss is GRPO's (docs/losses.md), averaged over each sequence's trained tokens and then over all sequences of the
batch.
"""

from __future__ import annotations

from collections import Counter
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
_LARGEST_ADVANTAGE = 1e30
"""float32 holds it, and its product with a ratio that is not absurd."""
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-3, 1e3
"""What the trainer divides logits by. A sampler takes no temperature between 0 and the lowest."""
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
class Bounds:
    """What the model takes."""

    vocab_size: int
    max_context_length: int


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The sequences of one step, and what of the batch cannot be trained on."""

    sequences: tuple[ScoredSequence, ...]
    skipped: int
    """Number of sequences that are left out, those of skipped groups included."""
    skipped_groups: int
    problems: Mapping[str, int]
    """Why, with the environment, as text -> number of groups or sequences."""


class _Unusable(Exception):
    """A group or a sequence cannot be trained on; the message says why."""


def make_batch(groups: Iterable[object], seq_len: int, bounds: Bounds | None = None) -> TrainingBatch:
    """Convert a batch. What cannot be trained on is left out and counted: a sequence, or a group whose lists disagree.

    `bounds` are checked if given, because the trainer would refuse whatever is sent together with a sequence beyond
    them.
    """
    rows: list[_Row] = []
    skipped, skipped_groups, problems = 0, 0, Counter[str]()
    for group in groups:
        try:
            checked = _Group.of(group)
        except _Unusable as error:
            skipped += _count(group)
            skipped_groups += 1
            problems[f"a group of {_environment(group)} {error}"] += 1
            continue
        for index in range(len(checked.tokens)):
            try:
                rows.append(_row(checked, index, seq_len, bounds))
            except _Unusable as error:
                skipped += 1
                problems[f"a sequence of {_environment(group)} {error}"] += 1
    return TrainingBatch(tuple(_sequence(row, len(rows)) for row in rows), skipped, skipped_groups, problems)


@dataclass(frozen=True, slots=True)
class _Group:
    """A group with one entry per sequence in each list."""

    tokens: Sequence[object]
    masks: Sequence[object]
    logprobs: Sequence[object]
    advantages: Sequence[Array]
    """One of each sequence, float64: shape [], or [tokens] if the group provides them."""
    temperatures: Sequence[object]

    @classmethod
    def of(cls, group: object) -> _Group:
        """Check a group's form. Raises _Unusable."""
        if not isinstance(group, Mapping):
            raise _Unusable("is no object")
        tokens = _list(group, "tokens")
        if not tokens:
            raise _Unusable("has no sequences")
        own = {name: _list(group, name, len(tokens)) for name in ("masks", "scores")}
        given = {name: _list(group, name, len(tokens)) if group.get(name) else [] for name in _OPTIONAL}
        overrides = _list(group, "overrides") if group.get("overrides") else []
        if len(overrides) > len(tokens):
            raise _Unusable(f"has {len(overrides)} overrides for {len(tokens)} sequences")
        overrides = [_object(each, "overrides") for each in overrides] + [{}] * (len(tokens) - len(overrides))
        shared = [_object(group.get(name), name) for name in ("generation_params", "group_overrides")]
        return cls(
            tokens,
            own["masks"],
            given["inference_logprobs"] or [None] * len(tokens),
            _advantages(own["scores"], given["advantages"], overrides),
            [_first("temperature", [override, *shared]) for override in overrides],
        )


_OPTIONAL = ("inference_logprobs", "advantages")


def _list(group: Mapping[str, Any], name: str, length: int | None = None) -> list[Any]:
    found = group.get(name)
    if not isinstance(found, list):
        raise _Unusable(f"has no list of {name}")
    if length is not None and len(found) != length:
        raise _Unusable(f"has {length} sequences and {len(found)} {name}")
    return found


def _object(value: object, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise _Unusable(f"has {name} that are no object")
    return value or {}


def _first(name: str, places: Iterable[Mapping[str, Any]]) -> object:
    return next((place[name] for place in places if place.get(name) is not None), None)


def _advantages(scores: list[Any], own: list[Any], overrides: Sequence[Mapping[str, Any]]) -> list[Array]:
    """Return each sequence's advantage.

    By default it is the score minus the group's mean, divided by the group's standard deviation; a group of one keeps
    its score. An override may set it to zero.
    """
    values = _numbers(scores, "scores")
    if not np.isfinite(values).all():
        raise _Unusable("has scores that are NaN or infinite")
    if len(values) > 1:
        with np.errstate(over="ignore", invalid="ignore"):
            values = (values - values.mean()) / max(float(values.std()), _MIN_DEVIATION)
    found = [_numbers(own[index], "advantages") if own and own[index] else score for index, score in enumerate(values)]
    zero = [bool(override.get("set_advantage_to_zero")) for override in overrides]
    return [np.zeros_like(each) if is_zero else np.asarray(each) for each, is_zero in zip(found, zero, strict=True)]


def _numbers(values: object, name: str, kinds: str = "iuf") -> Array:
    """Return a list of numbers as an array, shape [N], integers as int64 and others as float64. Raises _Unusable."""
    try:
        found = np.array(values if isinstance(values, list) else None)
    except ValueError:  # lists of different lengths
        found = np.array(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in kinds):
        raise _Unusable(f"has {name} that are no list of {'integers' if kinds == 'iu' else 'numbers'}")
    return found.astype(np.int64 if kinds == "iu" else np.float64)


def _count(group: object) -> int:
    """Return how many sequences a group says that it has."""
    tokens = group.get("tokens") if isinstance(group, Mapping) else None
    return len(tokens) if isinstance(tokens, list) else 0


def _environment(group: object) -> str:
    """Name the environment that a group comes from, as far as the API server says."""
    number = group.get("env_id") if isinstance(group, Mapping) else None
    return f"environment {number}" if isinstance(number, int) else "an environment without env_id"


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: Array
    targets: Array
    counted: Array
    logprobs: Array
    advantages: Array
    temperature: float


def _row(group: _Group, index: int, seq_len: int, bounds: Bounds | None) -> _Row:
    """Shift a sequence. Raises _Unusable if it cannot be trained on."""
    tokens, mask = _numbers(group.tokens[index], "tokens", "iu"), _numbers(group.masks[index], "masks", "iu")
    if tokens.size != mask.size:
        raise _Unusable(f"has {tokens.size} tokens and {mask.size} masks")
    longest = min(seq_len, bounds.max_context_length) if bounds else seq_len
    size, tokens, mask = tokens.size, tokens[: longest + 1], mask[: longest + 1]
    counted = mask[1:] != IGNORED
    if not counted.any():
        raise _Unusable(f"has no trained token within {longest} tokens")
    if (mask[1:] != tokens[1:])[counted].any():
        raise _Unusable(f"has masks that are neither {IGNORED} nor their token; a 1 or 0 would train the prompt too")
    if tokens.min() < 0 or (bounds and tokens.max() >= bounds.vocab_size):
        bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise _Unusable(f"has the token {bad}, which is not in the model's vocabulary")
    if not group.logprobs[index]:
        raise _Unusable("has no inference_logprobs; the environment's server must return them")
    logprobs = _numbers(group.logprobs[index], "inference_logprobs")
    if not len(tokens) <= len(logprobs) <= size:
        raise _Unusable(f"has {size} tokens and {logprobs.size} inference_logprobs")
    logprobs = logprobs[1 : len(tokens)].astype(np.float32)
    if not (np.isfinite(logprobs) & (logprobs <= 0))[counted].all():
        raise _Unusable("has inference_logprobs of trained tokens that are NaN, infinite or above 0")
    advantage = group.advantages[index]
    if advantage.ndim and advantage.size not in {size, mask.size}:
        raise _Unusable(f"has {size} tokens and {advantage.size} advantages")
    every = np.broadcast_to(advantage, mask.shape) if advantage.ndim == 0 else advantage[: mask.size]
    if not (np.abs(every) <= _LARGEST_ADVANTAGE).all():
        raise _Unusable("has advantages that are NaN or infinite")
    return _Row(tokens[:-1], tokens[1:], counted, logprobs, every[1:], _temperature(group.temperatures[index]))


def _temperature(given: object) -> float:
    """Return a sequence's sampling temperature; 1 if none is given, or 0 for greedy sampling. Raises _Unusable."""
    if given is None:
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= _HIGHEST_TEMPERATURE:
        raise _Unusable(f"has a temperature that is no number from 0 to {_HIGHEST_TEMPERATURE:g}")
    return max(float(given), _LOWEST_TEMPERATURE) if given else 1.0


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
    bytes_left = 0
    for sequence in sequences:
        cost = _BYTES_PER_TOKEN * len(sequence.counted)
        if not calls or len(calls[-1]) == min(size, MAX_DATUMS) or cost > bytes_left:
            calls.append([])
            bytes_left = _MAX_BYTES
        calls[-1].append(sequence)
        bytes_left -= cost
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

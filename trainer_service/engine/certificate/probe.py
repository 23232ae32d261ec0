"""Input of the startup check: random tokens in sequences of several lengths, for two runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PretrainedConfig

from paceline.types import Datum
from paceline.types.training import Array

LENGTHS = {"certificate-1": (72, 16), "certificate-2": (31, 7)}
"""Run -> tokens in each of its sequences. Few, because each costs time at every start; short and long, because short
ones fill no block and long ones exceed the windows of small models."""

Probe = dict[str, list[Datum]]
"""Run -> its sequences."""

_UNLIMITED = 1 << 20
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")


def make_probe(config: PretrainedConfig, seed: int) -> Probe:
    """Draw sequences that a model of `config` accepts, without its special tokens."""
    generator, text = np.random.default_rng(seed), config.get_text_config(decoder=True)
    usual = np.setdiff1d(np.arange(text.vocab_size), sorted(_special(config) | _special(text)))
    longest = context_length(config)
    return {run: [_draw(generator, min(n, longest), usual) for n in lengths] for run, lengths in LENGTHS.items()}


def context_length(config: PretrainedConfig) -> int:
    """Return the length of the longest sequence in tokens; 2^20 for models without a limit."""
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, field, None) for field in _CONTEXT_FIELDS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), _UNLIMITED)


def _draw(generator: np.random.Generator, length: int, tokens: Array) -> Datum:
    drawn = generator.choice(tokens, length + 1)
    weights = generator.uniform(0.5, 1.5, length).astype(np.float32)
    return Datum(drawn[:-1].astype(np.int32), {"target_tokens": drawn[1:].astype(np.int64), "weights": weights})


def _special(config: Any) -> set[int]:
    """Return the token ids that the config names, such as those for padding, images and the end of a sequence."""
    values = [value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index", "_id"))]
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return {one for one in flat if isinstance(one, int)}

"""Ragged RL batches, and how the models of `python -m bench.train` are described."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.types import Datum

SHORTEST, LONGEST = 32, 1024
LOSS_INPUTS = ("target_tokens", "mask", "logprobs", "advantages")


@dataclass(frozen=True)
class Model:
    """A model to train, with its size."""

    name: str
    path: str
    parameters: int
    vocab_size: int


def load_model(name: str, path: Path) -> Model:
    """Describe the model in a directory."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))  # type: ignore[no-untyped-call]
    return Model(name, str(path), sum(p.numel() for p in model.parameters()), model.config.vocab_size)


def draw_batch(size: int, vocab_size: int, seed: int, length: int | None = None) -> list[Datum]:
    """Draw datums with log-uniform lengths, the second half of each labelled, with one advantage per datum.

    With `length`, all are that long, and all of their positions are labelled.
    """
    rng = np.random.default_rng(seed)
    data = []
    if length is not None:
        rows = rng.integers(0, vocab_size, (size, length + 1)).tolist()
        return [Datum.from_completion(row[:1], row[1:], logprobs=-1.0, advantages=rng.normal()) for row in rows]
    for drawn in np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), size)).astype(int):
        tokens, labelled = rng.integers(0, vocab_size, drawn + 1), drawn // 2
        prompt, completion = tokens[:-labelled].tolist(), tokens[-labelled:].tolist()
        data.append(Datum.from_completion(prompt, completion, logprobs=-1.0, advantages=rng.normal()))
    return data


def save_batch(data: list[Datum], path: Path) -> Path:
    """Write a batch for the other arms."""
    arrays = {f"{i}.{name}": datum.loss_fn_inputs[name] for i, datum in enumerate(data) for name in LOSS_INPUTS}
    arrays |= {f"{i}.model_input": datum.model_input for i, datum in enumerate(data)}
    np.savez(path, **arrays)  # type: ignore[arg-type]  # for numpy's stubs any name may be `allow_pickle`
    return path


def load_batch(path: Path) -> list[dict[str, NDArray[np.generic]]]:
    """Read what `save_batch` wrote: the arrays of each datum by name."""
    with np.load(path) as arrays:
        count = 1 + max(int(name.partition(".")[0]) for name in arrays)
        return [{name: arrays[f"{i}.{name}"] for name in ("model_input", *LOSS_INPUTS)} for i in range(count)]

"""Direct preference optimisation (arXiv 2305.18290) on a file of pairs: a chosen and a rejected answer to a prompt.

    loss = -log sigmoid(beta * margin)
    margin = (lp(chosen) - ref(chosen)) - (lp(rejected) - ref(rejected))

lp is the log-probability of a whole answer, and ref that of the weights from which training began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from rich.console import Console

from paceline import AdamParams, Datum, ServiceClient, TrainingClient
from paceline.recipes.data import Batches, Example, Row, digest, example_of, read_split, render
from paceline.recipes.loop import Loop, Taken
from paceline.recipes.options import RowsOptions, option
from paceline.recipes.runs import open_run
from paceline.types.training import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoOptions(RowsOptions):
    """Options of `paceline dpo`."""

    learning_rate: float = option(5e-5, "learning rate of AdamW, after the warmup")
    beta: float = option(0.1, "how strongly the answers are held to those of the weights at the beginning")


@dataclass(frozen=True, slots=True)
class Pair:
    """The data of two answers to a prompt, each of one sequence or several."""

    chosen: Sequence[Datum]
    rejected: Sequence[Datum]


def dpo(service: ServiceClient, options: DpoOptions, console: Console) -> None:
    """Train on the pairs of a file. Raises BadRows before anything is trained, CannotContinue, PacelineError."""
    rows, held_out = read_split(options.data, options.eval, options.seed, _examples)
    batches = Batches(_pairs(service, rows, options.base_model), options.batch, options.seed)
    evaluation = _pairs(service, held_out, options.base_model)
    total = options.steps or options.epochs * batches.per_epoch
    name = options.name or f"dpo {options.data.stem}"
    console.print(f"{len(rows)} pairs to train on, {len(held_out)} held out, {total} steps", highlight=False)
    contents = {"recipe": "dpo", "data": digest(options.data)}
    training = open_run(service, options, name, contents, console.print)
    # The reference is a run that is never trained: the trainer computes both sides with the same arithmetic.
    untrained = replace(options, resume=True)
    reference = open_run(service, untrained, f"{name} (reference)", contents, lambda _: None)

    def take_step(done: int, rate: float) -> Taken:
        pairs = batches.batch(done)
        margins = _margins(training, reference, pairs)
        # The gradient of the loss reaches the weights as that of a cross entropy: -dloss/dlp is its weight of a token.
        pulls = options.beta / (1 + np.exp(options.beta * margins)) / len(pairs)
        data = [_weighted(one, sign * pull) for pair, pull in zip(pairs, pulls, strict=True)
                for sign, side in ((1, pair.chosen), (-1, pair.rejected)) for one in side]  # fmt: skip
        passed = training.forward_backward(data, "cross_entropy")
        update = training.optim_step(AdamParams(learning_rate=rate), only_if_succeeded=passed)
        values = _values(margins, options.beta)
        return Taken(update.result(), values.pop("loss"), values)

    def evaluate() -> dict[str, float]:
        return _values(_margins(training, reference, evaluation), options.beta)

    Loop(service, training, options, total, console, name).run(take_step, evaluate if evaluation else None)
    service.delete_run(reference.run_id)


def _values(margins: Array, beta: float) -> dict[str, float]:
    """Return what a batch is judged by: the share of pairs that are ordered as asked, and the rewards' difference."""
    loss = np.logaddexp(0, -beta * margins).mean()
    return {"loss": float(loss), "accuracy": float((margins > 0).mean()), "margin": float(beta * margins.mean())}


def _margins(training: TrainingClient, reference: TrainingClient, pairs: Sequence[Pair]) -> Array:
    """Return the margin of each pair, in nats."""
    data = list(chain.from_iterable((*pair.chosen, *pair.rejected) for pair in pairs))
    now, before = training.forward(data, "cross_entropy"), reference.forward(data, "cross_entropy")
    outputs = zip(now.result().loss_fn_outputs, before.result().loss_fn_outputs, strict=True)
    # Where the mask is 0 both are 0.
    gains = iter([float(np.sum(new["logprobs"]) - np.sum(old["logprobs"])) for new, old in outputs])
    return np.array([sum(next(gains) for _ in pair.chosen) - sum(next(gains) for _ in pair.rejected)
                     for pair in pairs])  # fmt: skip


def _weighted(datum: Datum, weight: float) -> Datum:
    """Return a datum whose counted tokens have this weight."""
    inputs = datum.loss_fn_inputs
    return Datum(datum.model_input, {**inputs, "weights": np.full(len(datum.model_input), weight, np.float32)})


def _examples(row: Mapping[str, Any]) -> tuple[Example, Example]:
    return example_of(row, "chosen"), example_of(row, "rejected")


def _pairs(service: ServiceClient, rows: Sequence[Row[tuple[Example, Example]]], base_model: str) -> list[Pair]:
    chosen, rejected = (
        render(service, [Row(row.place, row.value[side]) for row in rows], base_model) for side in (0, 1)
    )
    return [Pair(*sides) for sides in zip(chosen, rejected, strict=True)]

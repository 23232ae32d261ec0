"""Supervised fine-tuning on a file of conversations, or of prompts and completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.console import Console

from paceline import AdamParams, ServiceClient, errors
from paceline.recipes.data import Batches, Example, conversation_of, digest, example_of, read_split, render
from paceline.recipes.loop import Loop, Taken
from paceline.recipes.options import RowsOptions
from paceline.recipes.runs import open_run


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions(RowsOptions):
    """Options of `paceline sft`."""


def sft(service: ServiceClient, options: SftOptions, console: Console) -> None:
    """Train on the rows of a file. Raises BadRows before anything is trained, CannotContinue, PacelineError."""
    rows, held_out = read_split(options.data, options.eval, options.seed, _example)
    data = render(service, rows, options.base_model)
    evaluation = list(chain(*render(service, held_out, options.base_model)))
    batches = Batches(data, options.batch, options.seed)
    total = options.steps or options.epochs * batches.per_epoch
    name = options.name or f"sft {options.data.stem}"
    console.print(f"{len(rows)} rows to train on, {len(held_out)} held out, {total} steps", highlight=False)
    training = open_run(service, options, name, {"recipe": "sft", "data": digest(options.data)}, console.print)

    def take_step(done: int, rate: float) -> Taken:
        # Both are issued before either is awaited, so the trainer does not pause between them. The step is not taken
        # on a part of the batch. The loss is a sum over tokens: AdamW's step does not depend on its scale.
        passed = training.forward_backward(list(chain(*batches.batch(done))), "cross_entropy")
        update = training.optim_step(AdamParams(learning_rate=rate), only_if_succeeded=passed)
        return Taken(update.result(), mean_loss(passed.result().metrics))

    def evaluate() -> dict[str, float]:
        return {"loss": mean_loss(training.forward(evaluation, "cross_entropy").result().metrics)}

    Loop(service, training, options, total, console, name).run(take_step, evaluate if evaluation else None)


def mean_loss(metrics: Mapping[str, float]) -> float:
    """Return the loss per counted token, in nats."""
    return metrics["loss:sum"] / metrics["tokens:sum"]


def _example(row: Mapping[str, Any]) -> Example:
    if "messages" in row:
        return conversation_of(row, row["messages"])
    if "prompt" in row:
        return example_of(row, "completion")
    raise errors.MissingField("is not set, nor is `prompt`; give one of them", field="messages")

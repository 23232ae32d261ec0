"""Options that all recipes have; a field's metadata is its help on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument
from paceline.loggers import Settings, check_targets

SCHEDULES = ("constant", "linear", "cosine")
_LENGTH = frozenset({"steps", "epochs"})
_NOT_COMPARED = frozenset({"name", "resume", "data", "task", "log", "out", "save_every", "eval_every"})
"""May change when a run is continued. What is in the files is compared by the recipes."""


def option(default: Any, text: str, **more: Any) -> Any:
    """Return a field with this default and help."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of every recipe."""

    name: str = option("", "name of the run; if not given, the recipe's and the file's")
    resume: bool = option(False, "continue the run of this name, if there is one", names=("--resume",))
    base_model: str = option("", "model to train; if not given, the served one")
    start: str = option("", "checkpoint to begin from, instead of a new adapter", names=("--from",))
    rank: int = option(16, "rank of the adapter", minimum=1)
    learning_rate: float = option(2e-4, "learning rate of AdamW, after the warmup")
    schedule: str = option("constant", "learning rate after the warmup: down to 0, or not", choices=SCHEDULES)
    warmup: int = option(0, "steps in which the learning rate rises to its value", minimum=0)
    steps: int = option(0, "optimizer steps; 0: as many as the epochs have", minimum=0)
    seed: int = option(0, "seed of the adapter, of the order and of samples", minimum=0)
    eval_every: int = option(20, "steps between evaluations", minimum=1)
    save_every: int = option(50, "steps between state checkpoints, of which the latest is kept", minimum=1)
    log: tuple[str, ...] = option((), "also log to jsonl:FILE, tensorboard:DIR, wandb:PROJECT, trackio:PROJECT")
    out: Path | None = field(default=None, metadata={"help": "new directory for the adapter, in PEFT's layout"})

    def check(self) -> None:
        """Refuse what could only fail later. Raises InvalidArgument, MissingExtra."""
        check_targets(self.log)
        if self.out is not None and self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise InvalidArgument("exists and is not an empty directory; give another one", field="out")

    def rate(self, step: int, total: int) -> float:
        """Return the learning rate of the step after `step` others, of `total`."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, total - self.warmup)
        factors = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return self.learning_rate * factors[self.schedule]

    def compared(self) -> Settings:
        """Return what must be the same when a run is continued, by name."""
        # A longer run takes the same first steps, unless the learning rate depends on the number of all.
        free = _NOT_COMPARED | _LENGTH if self.schedule == "constant" else _NOT_COMPARED
        return {name: str(getattr(self, name)) for name in self.__dataclass_fields__ if name not in free}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOptions(TrainingOptions):
    """Options of the recipes that train on a file."""

    data: Path = field(metadata={"help": "file of rows: a JSON object a line", "argument": "FILE"})
    eval: str = option("0.05", "share of the rows that is held out, or a file of other rows; 0: none")
    batch: int = option(16, "rows in a step", minimum=1)
    epochs: int = option(1, "how often each row is trained on", minimum=1)

"""Where a training loop writes what it measures: a file, TensorBoard, Weights & Biases, Trackio.

    logger = paceline.loggers.JsonlLogger("metrics.jsonl")
    logger.log(1, {"loss": 2.5})
    logger.close()

The trainer keeps the metrics of every run by itself (docs/metrics.md); these are for tools that you use already.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import InvalidArgument
from paceline.extras import needing

Settings = Mapping[str, Any]
"""What describes a run beside its values: numbers and texts by name."""


class Logger(Protocol):
    """Takes the values of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step. Steps do not go back, except where a killed loop repeats one."""

    def close(self) -> None:
        """Write what is left. Nothing may be logged afterwards."""


class JsonlLogger:
    """Appends a line of JSON for each step to a file: `step`, and the values; one that is not finite is null."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - close() closes it

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()  # so that a killed loop loses none

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    """Writes an event file to a directory; needs the extra `tensorboard`."""

    def __init__(self, directory: str | Path) -> None:
        with needing("tensorboard", "TensorBoardLogger"):
            from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
            from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        tagged = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=tagged)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Writes to a project of Weights & Biases; needs the extra `wandb`.

    With a `run_id` that the project has, its run is continued. W&B reads its own variables: with WANDB_MODE=offline it
    writes a folder that `wandb sync` uploads later.
    """

    def __init__(
        self, project: str, *, name: str | None = None, run_id: str | None = None, settings: Settings | None = None
    ) -> None:
        with needing("wandb", "WandbLogger"):
            import wandb  # noqa: PLC0415
        config = dict(settings or {})
        self._run = wandb.init(project=project, name=name, id=run_id, config=config, resume="allow" if run_id else None)
        # The step is a value of its own: W&B's counter never goes back, and would drop a step that is repeated.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class TrackioLogger:
    """Writes to a project of Trackio, a database on this machine; needs the extra `trackio`.

    A run of the project that has this `name` already is continued.
    """

    def __init__(self, project: str, *, name: str | None = None, settings: Settings | None = None) -> None:
        with needing("trackio", "TrackioLogger"):
            import trackio  # noqa: PLC0415
        resume = "allow" if name else "never"
        self._run = trackio.init(project=project, name=name, config=dict(settings or {}), resume=resume, embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """Several loggers as one."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for one in self._loggers:
            one.log(step, values)

    def close(self) -> None:
        for one in self._loggers:
            one.close()


_KINDS: dict[str, Callable[[str, str, str, Settings], Logger]] = {
    "jsonl": lambda where, _name, _run_id, _settings: JsonlLogger(where),
    "tensorboard": lambda where, _name, _run_id, _settings: TensorBoardLogger(where),
    "wandb": lambda where, name, run_id, settings: WandbLogger(where, name=name, run_id=run_id, settings=settings),
    "trackio": lambda where, name, run_id, settings: TrackioLogger(where, name=f"{name} ({run_id})", settings=settings),
}


def make_loggers(targets: Sequence[str], name: str, run_id: str, settings: Settings) -> Loggers:
    """Return the loggers that texts name: jsonl:FILE, tensorboard:DIRECTORY, wandb:PROJECT, trackio:PROJECT.

    `name`, `run_id` and `settings` are those of the run; what was logged of it before is continued. Raises what
    `check_targets` raises.
    """
    check_targets(targets)
    split = [target.partition(":") for target in targets]
    return Loggers([_KINDS[kind](where, name, run_id, settings) for kind, _, where in split])


def check_targets(targets: Sequence[str]) -> None:
    """Check, before anything is written, what `make_loggers` gets. Raises InvalidArgument, MissingExtra."""
    for kind, _, where in (target.partition(":") for target in targets):
        if kind not in _KINDS or not where:
            kinds = "jsonl:FILE, tensorboard:DIRECTORY, wandb:PROJECT or trackio:PROJECT"
            raise InvalidArgument(f"has {f'{kind}:{where}'!r}; give {kinds}", field="log")
        if kind != "jsonl":
            with needing(kind, f"logging to {kind}"):
                import_module(kind)

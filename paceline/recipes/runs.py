"""Runs by name: a loop that was killed, and is started again, goes on where its run is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline import ServiceClient, TrainingClient, errors
from paceline.loggers import Settings
from paceline.recipes.options import TrainingOptions


class CannotContinue(ValueError):
    """A run of this name cannot be continued as it was asked. The message says why, and what to do."""


def attach(service: ServiceClient, name: str, settings: str, say: Callable[[str], None]) -> TrainingClient | None:
    """Attach to the run of this name; return None if there is none. Raises CannotContinue if it has other settings.

    Attaching waits for the commands that a killed loop had sent. The gradient of a step that it did not take is
    discarded, because that step is made again from its beginning.
    """
    found = [run for run in service.list_runs() if run.user_metadata.get("name") == name]
    if not found:
        return None
    # There are two if the loop was killed, and started again, while its run was being created: one is unused.
    run = max(found, key=lambda run: run.step)
    if (made_with := run.user_metadata.get("settings", "")) != settings:
        different = _differences(made_with, settings)
        raise CannotContinue(f"the run {name!r} was made with {different}; give the same, or another --name")
    if left := run.last_seq_id - run.executed_seq_id:
        say(f"waiting for {left} command(s) that the earlier loop left")
    training = service.get_training_client(run.run_id)
    run = training.get_info()
    say(f"continuing {name!r} ({run.run_id}), which has taken {run.step} step(s)")
    if run.gradient_tokens:
        training.discard_gradient().result()
    return training


def open_run(
    service: ServiceClient, options: TrainingOptions, name: str, contents: Settings, say: Callable[[str], None]
) -> TrainingClient:
    """Continue the run of this name, or make one as the options say: with a new adapter, or from a checkpoint.

    `contents` say what the run is trained on: a run that is continued has the same. Raises CannotContinue, also if
    there is a run of this name and `resume` is not set, and what `TrainingOptions.check` raises.
    """
    options.check()
    text = json.dumps({**options.compared(), **contents}, sort_keys=True)
    if options.resume and (training := attach(service, name, text, say)):
        return training
    if not options.resume and any(run.user_metadata.get("name") == name for run in service.list_runs()):
        raise CannotContinue(f"there is a run {name!r}; continue it with --resume, or give another --name")
    metadata = {"name": name, "settings": text}
    if not options.start:
        return service.create_lora_training_client(
            options.base_model, options.rank, seed=options.seed, user_metadata=metadata
        )
    training = service.create_training_client_from_state(options.start)
    service.update_run(training.run_id, metadata)
    return training


@contextmanager
def until_superseded() -> Iterator[None]:
    """End the program, with a sentence, if its run cannot be continued, or once another script has attached to it."""
    try:
        yield
    except CannotContinue as failure:
        raise SystemExit(str(failure)) from None
    except errors.ClientSuperseded:
        raise SystemExit("another script has attached to the run and continues it; this one ends") from None


def _differences(made_with: str, given: str) -> str:
    """Name the settings that differ, or all if they are no JSON."""
    try:
        old, new = json.loads(made_with), json.loads(given)
        return ", ".join(f"{name} {old.get(name)}, not {new[name]}" for name in new if old.get(name) != new[name])
    except (ValueError, AttributeError):
        return f"{made_with or 'other settings'}, not {given}"

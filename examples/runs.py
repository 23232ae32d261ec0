"""Runs by name: a script that was killed, and is started again, goes on where its run is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline import ServiceClient, TrainingClient, errors


def attach(service: ServiceClient, name: str, settings: str) -> TrainingClient | None:
    """Attach to the run of this name; return None if there is none. Ends the script if the run has other settings.

    Attaching waits for the commands that the killed script had sent. The gradient of a step that it did not take is
    discarded, because that step is made again from its beginning.
    """
    found = [run for run in service.list_runs() if run.user_metadata.get("name") == name]
    if not found:
        return None
    # There are two if the script was killed, and started again, while its run was being created: one is unused.
    run = max(found, key=lambda run: run.step)
    if (made_with := run.user_metadata.get("settings", "")) != settings:
        raise SystemExit(f"the run {name!r} was made with {made_with}, not {settings}; give those, or another --name")
    if left := run.last_seq_id - run.executed_seq_id:
        print(f"waiting for {left} command(s) that the earlier script left")
    training = service.get_training_client(run.run_id)
    run = training.get_info()
    print(f"continuing {name!r} ({run.run_id}), which has taken {run.step} step(s)")
    if run.gradient_tokens:
        training.discard_gradient()
    return training


@contextmanager
def until_superseded() -> Iterator[None]:
    """End the script, with a sentence, once another one has attached to its run."""
    try:
        yield
    except errors.ClientSuperseded:
        raise SystemExit("another script has attached to the run and continues it; this one ends") from None

"""The state directory, used by one `paceline up` at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.up.errors import CannotStart

_LOCK = "lock"


def make_state(state: Path) -> None:
    """Create the directory if it does not exist. Raises CannotStart."""
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"--state {state} cannot be made ({error.strerror}); choose another directory") from error


@contextmanager
def held_state(state: Path) -> Iterator[None]:
    """Hold the directory's lock while the block runs; create the directory if it does not exist.

    The lock is released however the process ends. Raises CannotStart if the directory cannot be created or another
    process holds it.
    """
    make_state(state)
    lock = os.open(state / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotStart(
                f"--state {state} is used by another `paceline up`; stop that one, or choose another directory"
            ) from None
        yield
    finally:
        os.close(lock)

"""The state directory, which one `paceline up` uses at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.up.errors import CannotStart

_LOCK = "lock"


def make_state(state: Path) -> None:
    """Make the directory where there is none. Raises CannotStart."""
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"--state {state} cannot be made ({error.strerror}); choose another directory") from error


@contextmanager
def held_state(state: Path) -> Iterator[None]:
    """Keep others out of the directory while the block runs, however that ends; make it where there is none.

    Raises CannotStart for one that cannot be made, or that another process holds.
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

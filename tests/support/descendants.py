"""Processes that a process started."""

from __future__ import annotations

from contextlib import suppress

import psutil


def descendants(word: str = "", pid: int | None = None) -> list[psutil.Process]:
    """Return the living descendants of a process, by default this one, newest last.

    With `word`, return only those whose command contains it.
    """
    found = []
    for process in sorted(psutil.Process(pid).children(recursive=True), key=lambda child: child.create_time()):
        with suppress(psutil.NoSuchProcess):  # It has ended, or is a zombie.
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found

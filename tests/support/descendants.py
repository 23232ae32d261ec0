"""Processes that a process started."""

from __future__ import annotations

from contextlib import suppress

import psutil


def descendants(word: str = "", pid: int | None = None) -> list[psutil.Process]:
    """Living processes that a process, else this one, and its own started, the newest last.

    Only those with a word in their command, if one is given.
    """
    found = []
    for process in sorted(psutil.Process(pid).children(recursive=True), key=lambda child: child.create_time()):
        with suppress(psutil.NoSuchProcess):  # It ended meanwhile, or did and nobody has asked how.
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found

"""Determine from a service's log, in one line, why it ended."""

from __future__ import annotations

import re
import signal
from itertools import pairwise
from pathlib import Path

_READ_BYTES = 1 << 20
_LONGEST = 400

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^(?:\([^()]*\) *)?(?:ERROR|CRITICAL) [\d:. -]+\[[^\]]*\] ")
"""Prefix of the lines of vLLM's logs."""
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Refused|Exit|Interrupt)\b(?:: .+)?$")
_DETAIL = re.compile(r"^ +(?!File \")\S")
"""Line that pydantic writes below an error: its first problem."""
_NOISE = re.compile(r"^(?:\s|Traceback |During handling|The above exception|[^ ]*: \w*Warning: )")


def reason_of(status: int, log: Path, start: int) -> str:
    """Return why a process ended with this status; `start` is the offset of its first line in the log.

    The first error for which the process, or a child of it, printed a traceback is the cause of later ones. Without a
    traceback, the reason is the last line that the process wrote.
    """
    if status < 0:
        name = signal.Signals(-status).name
        return f"{name}, mostly the kernel, out of memory" if name == "SIGKILL" else name
    if status == 0:
        return "it left without an error, as when it is sent SIGTERM"
    with log.open("rb") as file:
        file.seek(start)
        text = file.read(_READ_BYTES).decode(errors="replace")
    lines = [_PREFIX.sub("", _COLORS.sub("", line)).rstrip() for line in text.splitlines()]
    raised = [
        f"{line}: {after.strip()}" if _DETAIL.match(after) else line
        for line, after in pairwise([*lines, ""])
        if _RAISED.match(line)
    ]
    said = [line for line in lines if line and not _NOISE.match(line)]
    return (raised[:1] or said[-1:] or ["it wrote nothing"])[0][:_LONGEST]

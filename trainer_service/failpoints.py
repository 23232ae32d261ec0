"""Named points at which tests let a process die, as a power cut or the kernel would: SIGKILL, without warning.

`PACELINE_TRAINER_FAILPOINTS="after_sync:3"` kills the service's process the third time it comes to that point;
`engine_OptimStep:2` kills the engine's process when its second OptimStep has been executed and not yet answered, and
`engine_OptimStep:2+` also every time after that, in every engine that is started; `engine_pass_<run_id>:1` when it
begins a pass that the run has a part in. Several are separated by commas.
Unset, as it is outside tests, a point costs a look into an empty table.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

SERVICE_POINTS = (
    "before_append",
    "mid_append",
    "after_append",
    "after_sync",
    "before_execute",
    "after_capture",
    "before_checkpoint",
    "before_announce",
    "after_execute",
    "after_answer",
    "before_ack",
    "after_ack",
    "before_snapshot",
    "during_snapshot",
    "after_snapshot",
    "during_recovery",
)
"""Points of the service's process.

Those of the engine are `engine_` and the name of a command of engine/messages.py, or `engine_pass_` and a run's id.
"""


class Failpoints:
    """Counts how often each point was passed and ends the process where it was told to."""

    def __init__(self, spec: str) -> None:
        self._left: dict[str, int] = {}
        self._always: set[str] = set()
        for part in filter(None, spec.split(",")):
            name, _, count = part.partition(":")
            if not (name in SERVICE_POINTS or name.startswith("engine_")) or not count.rstrip("+").isdigit():
                raise ValueError(f"{part!r} is not of the form name:count; names: {', '.join(SERVICE_POINTS)}")
            self._left[name] = int(count.rstrip("+"))
            if count.endswith("+"):
                self._always.add(part)

    @property
    def lasting(self) -> str:
        """The points that also hold for an engine that is started again."""
        return ",".join(sorted(self._always))

    def is_next(self, name: str) -> bool:
        """Whether the process dies when it comes to this point now."""
        return self._left.get(name, 0) == 1

    def hit(self, name: str) -> None:
        """Pass a point; or do not come back."""
        if name not in self._left:
            return
        self._left[name] -= 1
        if self._left[name] == 0:
            die()


NO_FAILPOINTS = Failpoints("")


def die() -> NoReturn:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its SIGKILL")

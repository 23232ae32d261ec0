"""Named points at which tests kill a process with SIGKILL, without warning, as a power cut or the kernel would.

`PACELINE_TRAINER_FAILPOINTS="after_sync:3"` kills the service process the third time it reaches that point.
`engine_OptimStep:2` kills the engine process when its second OptimStep has been executed and not yet answered;
`engine_OptimStep:2+` also does so in every engine that is started later. `engine_pass_<run_id>:1` kills it when it
starts a pass in which the run takes part. Several points are separated by commas.
When unset, as outside tests, a point costs one lookup in an empty table.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

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
"""Points of the service process.

Points of the engine are `engine_` and the name of a command in engine_link/messages.py, or `engine_pass_` and a run's
id.
"""


class Failpoints:
    """Counts how often each point is passed and kills the process where the specification says so."""

    def __init__(self, spec: str) -> None:
        self.left: dict[str, int] = {}
        """How often each point is still to be passed; the last time kills the process."""
        self._always: set[str] = set()
        for part in filter(None, spec.split(",")):
            name, _, count = part.partition(":")
            if not (name in SERVICE_POINTS or name.startswith("engine_")) or not count.rstrip("+").isdigit():
                raise ValueError(f"{part!r} does not have the form name:count; names: {', '.join(SERVICE_POINTS)}")
            self.left[name] = int(count.rstrip("+"))
            if count.endswith("+"):
                self._always.add(part)
        self.hit: Callable[[str], object] = self._count_down if self.left else self.left.get
        """Pass a point, or kill the process there if it is due."""

    @property
    def lasting(self) -> str:
        """The points that also apply to engines started later."""
        return ",".join(sorted(self._always))

    def _count_down(self, name: str) -> None:
        if name not in self.left:
            return
        self.left[name] -= 1
        if self.left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a process outlived its SIGKILL")


NO_FAILPOINTS = Failpoints("")

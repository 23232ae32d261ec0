"""Time that nobody can set: seconds that passed on the machine, continued across restarts of a service.

The wall clock may jump: a virtual machine is resumed, time is synchronised, an operator corrects it. So it tells people
when something happened, and nothing ends or is deleted because of it alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline import errors, layout
from paceline.files.regular_files import read_file
from paceline.log import get_logger

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = get_logger(__name__)


class _Reading(msgspec.Struct, frozen=True):
    """What a clock's file holds: `seconds` had passed when the machine, in its boot `boot`, was up for `uptime`."""

    boot: str
    uptime: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's clocks."""

    boot: str
    """Identifies the time from the machine's start to its end; empty if the machine does not tell."""
    uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    """Returns the seconds since the start, suspended ones included. Setting the time does not change it."""
    wall: Callable[[], float] = time.time
    """Returns seconds since the epoch, as the machine's time is set."""

    @classmethod
    def here(cls) -> Machine:
        """Return this machine's clocks."""
        return cls(_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "")


class SteadyClock:
    """Counts seconds, and goes on after a restart of the service. It is never ahead of the time that passed.

    Seconds in which the machine was off are not counted.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        """Begin at the wall clock's time. Without a file (`resume`) the clock ends with this object."""
        self._machine = machine or Machine.here()
        self._began, self._base = self._machine.uptime(), self._machine.wall()
        self._file: Path | None = None

    def resume(self, file: Path, *, counts_downtime: bool) -> None:
        """Continue the clock of a file, if there is one that can be read, and keep this one in it.

        With `counts_downtime` also the seconds count in which the machine ran and the service did not. Raises
        NotRegularFile if the path is of something else, and OSError if the file may not be read.
        """
        self._file = file
        if (last := self._last()) is not None:
            is_same_boot = bool(last.boot) and last.boot == self._machine.boot
            self._began, self._base = self._machine.uptime(), last.seconds
            if counts_downtime and is_same_boot:
                self._base += max(0.0, self._began - last.uptime)
        self.save()

    def now(self) -> float:
        """Return the seconds that the clock has counted."""
        return self._base + self._machine.uptime() - self._began

    def wall(self) -> float:
        """Return the machine's time in seconds since the epoch, for people."""
        return self._machine.wall()

    def save(self) -> None:
        """Write the clock to its file, from which it continues. If that fails, it continues from an earlier time."""
        if self._file is None:
            return
        uptime = self._machine.uptime()
        reading = _Reading(self._machine.boot, uptime, self._base + uptime - self._began)
        try:
            layout.write_file(self._file, msgspec.json.encode(reading))
        except (errors.DiskFull, OSError) as error:
            _log.warning("clock not saved; it is tried again", file=str(self._file), error=str(error))

    def _last(self) -> _Reading | None:
        """Return what the file holds; None if there is none, or it is damaged."""
        if self._file is None:
            return None
        try:
            return msgspec.json.decode(read_file(self._file), type=_Reading)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            _log.warning("clock file damaged; the clock begins again", file=str(self._file), error=str(error))
            return None

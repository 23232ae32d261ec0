"""A machine whose clocks a test sets."""

from __future__ import annotations

from paceline.steady_clock import Machine


class FakeMachine:
    """Clocks that stand still unless a test moves them."""

    def __init__(self, boot: str = "first") -> None:
        self.boot = boot
        self.uptime, self.wall = 500.0, 1.8e9

    def machine(self) -> Machine:
        """Return the machine as a clock sees it."""
        return Machine(self.boot, lambda: self.uptime, lambda: self.wall)

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.uptime += seconds
        self.wall += seconds

    def reboot(self, seconds_off: float) -> None:
        """Turn the machine off and on again."""
        self.boot += "+"
        self.uptime = 0.0
        self.wall += seconds_off

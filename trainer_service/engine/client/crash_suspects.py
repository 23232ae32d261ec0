"""Which commands an engine may have died of, when it died while it did several things at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from trainer_service.engine import messages


class CrashSuspects:
    """Commands to execute alone until they are answered, so that the engine's next death is certainly of one of them.

    A command that is sent again after a restart is known by its content.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def __contains__(self, command: messages.Overlapping) -> bool:
        return bool(self._digests) and _digest(command) in self._digests

    def add(self, commands: Sequence[messages.Overlapping]) -> None:
        """Suspect commands that were in one pass, or were being written meanwhile."""
        self._digests.update(map(_digest, commands))

    def acquit(self, command: messages.Overlapping) -> None:
        """Forget a command that was answered."""
        if self._digests:
            self._digests.discard(_digest(command))


def _digest(command: messages.Overlapping) -> bytes:
    if not isinstance(command, messages.ForwardBackward):
        command = msgspec.structs.replace(command, directory="")  # another one each time
    return hashlib.sha256(messages.encode(command)).digest()

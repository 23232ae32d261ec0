"""Track the commands that may have killed an engine that was executing several at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from trainer_service.engine import messages


class CrashSuspects:
    """Commands to execute alone until they are answered, so that the engine's next death has one certain cause.

    A command that is sent again after a restart is recognised by its content.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def __contains__(self, command: messages.Overlapping) -> bool:
        return bool(self._digests) and _digest(command) in self._digests

    def add(self, commands: Sequence[messages.Overlapping]) -> None:
        """Suspect commands that shared a pass, or were being written at the time."""
        self._digests.update(map(_digest, commands))

    def acquit(self, command: messages.Overlapping) -> None:
        """Stop suspecting a command that was answered."""
        if self._digests:
            self._digests.discard(_digest(command))


def _digest(command: messages.Overlapping) -> bytes:
    if not isinstance(command, messages.ForwardBackward):
        command = msgspec.structs.replace(command, directory="")  # differs each time
    return hashlib.sha256(messages.encode(command)).digest()

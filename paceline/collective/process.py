"""A service's handle on its process group member: a child process, which can be killed whatever it is waiting for."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from paceline.child import Child, reason_of_status
from paceline.errors import PeerLost

_START_SECONDS = 120.0
"""How long a member may take to load torch; it may take as long again to meet the others, which load it too."""


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """One member's part in one generation of the group."""

    backend: str
    """gloo, or nccl for GPUs."""
    address: str
    """host:port of the store at which members meet. Rank 0 listens on it; its port may be 0."""
    generation: int
    rank: int
    size: int
    seconds: float
    """Timeout of a transfer."""


class GroupMember:
    """Broadcasts files from rank 0 to all others, in the order of the calls.

    Any failure, of this member or another, raises PeerLost: the group is then unusable and a new generation is made.
    """

    def __init__(
        self, child: Child, events: asyncio.StreamReader, jobs: asyncio.StreamWriter, membership: GroupMembership
    ) -> None:
        self.generation = membership.generation
        self._child = child
        self._events, self._jobs = events, jobs
        self._membership = membership
        self._busy = asyncio.Lock()

    @classmethod
    async def start(cls, membership: GroupMembership) -> Self:
        """Start the process without waiting for it to join."""
        words = ("-m", "paceline.collective.member", json.dumps(asdict(membership)))
        return cls(*await Child.start_linked(words), membership)

    @property
    def pid(self) -> int:
        """Process id of the member."""
        return self._child.pid

    async def listening(self) -> int:
        """Return the port of the store; only for rank 0."""
        async with self._busy:
            return int((await self._receive("listening", _START_SECONDS))["port"])

    async def join(self) -> None:
        """Wait until all members have joined. `metadata["missing"]` of rank 0's PeerLost lists the missing ranks."""
        async with self._busy:
            await self._receive("joined", 2 * _START_SECONDS)

    async def transfer(self, path: Path | None, size: int) -> None:
        """Send the file `path` of `size` bytes as rank 0; other ranks write it to the new file `path`, if any."""
        async with self._busy:
            try:
                self._send({"path": None if path is None else str(path), "size": size})
                await self._receive("done", self._membership.seconds)
            except BaseException:
                # After any failure, the members may no longer be at the same transfer.
                self._kill()
                raise

    async def stop(self) -> None:
        """Kill the process and wait for it."""
        self._kill()
        await self._child.wait()

    def _kill(self) -> None:
        self._child.kill()
        self._jobs.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._jobs.is_closing():
            raise PeerLost("the group has ended; a new one is being made")
        self._jobs.write(json.dumps(message).encode() + b"\n")

    async def _receive(self, event: str, seconds: float) -> dict[str, Any]:
        line = b""
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):  # It died with a job unread.
                    line = await self._events.readline()
                if not line.endswith(b"\n"):
                    reason = reason_of_status(await self._child.wait())
                    raise PeerLost(f"the group ended: its process died ({reason})")
        except TimeoutError as error:
            raise PeerLost(f"the group's members did not all answer within {seconds} s") from error
        message: dict[str, Any] = json.loads(line)
        if message["event"] != event:
            missing = ",".join(map(str, message.get("missing", ())))
            raise PeerLost(f"the group ended: {message.get('error', event)}", metadata={"missing": missing})
        return message

"""Who watches, what they hold, and what they said of each version.

The trainer keeps no list of samplers beyond this.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum

from paceline import errors
from paceline.log import get_logger
from paceline.weights.v1 import weight_service_pb2 as pb

VersionKey = tuple[str, int]
"""run_id and version number."""

_log = get_logger(__name__)


class AckPolicy(Enum):
    """Whose acknowledgement a publish waits for. The values are those of the wire."""

    NONE = 1
    ANY = 2
    ALL = 3


@dataclass(slots=True, eq=False)
class Watcher:
    """A sampler that watches."""

    sampler_id: str
    held: set[VersionKey]
    joins_group: bool = False
    """Whether it is to be in the process group over which versions are broadcast."""
    links_staged: bool = False
    """Whether it wants to hear of versions as soon as their files are staged."""
    outbox: asyncio.Queue[pb.WatchVersionsResponse] = field(default_factory=asyncio.Queue)

    def announce(self, announcement: pb.Announcement) -> None:
        """Tell it of a version."""
        self.outbox.put_nowait(pb.WatchVersionsResponse(announcement=announcement))


class Feed:
    """Announces versions and gathers what samplers answer."""

    def __init__(self) -> None:
        self._watchers: dict[str, Watcher] = {}
        self._newest: dict[str, pb.Announcement] = {}
        self._acks: dict[VersionKey, dict[str, pb.Acknowledgement]] = defaultdict(dict)
        self._refusals: dict[VersionKey, dict[str, str]] = defaultdict(dict)
        self._changed = asyncio.Condition()

    def count(self) -> int:
        """Return how many watch."""
        return len(self._watchers)

    def watchers(self) -> list[Watcher]:
        """Return who watches."""
        return list(self._watchers.values())

    async def join(self, watcher: Watcher) -> None:
        """Take in a watcher and announce to it what is newer than what it holds."""
        self._watchers[watcher.sampler_id] = watcher
        for run_id, announcement in self._newest.items():
            if (run_id, announcement.manifest.model.version) not in watcher.held:
                watcher.announce(announcement)
        _log.info("sampler watches", sampler=watcher.sampler_id, holds=len(watcher.held))
        await self._notify()

    async def leave(self, watcher: Watcher) -> None:
        """Drop a watcher; its leases end."""
        if self._watchers.get(watcher.sampler_id) is watcher:
            del self._watchers[watcher.sampler_id]
        _log.info("sampler left", sampler=watcher.sampler_id)
        await self._notify()

    def offer(self, staged: pb.Staged) -> None:
        """Tell those that share this machine's memory of a version that is about to exist."""
        for watcher in self._watchers.values():
            if watcher.links_staged:
                watcher.outbox.put_nowait(pb.WatchVersionsResponse(staged=staged))

    def announce(self, announcement: pb.Announcement) -> frozenset[str]:
        """Tell every watcher of a version; return their names."""
        model = announcement.manifest.model
        newest = self._newest.get(model.run_id)
        if newest is None or newest.manifest.model.version <= model.version:
            # Who comes later is not in the group that it is broadcast to now.
            self._newest[model.run_id] = pb.Announcement(
                manifest=announcement.manifest, volume_path=announcement.volume_path
            )
        for watcher in self._watchers.values():
            watcher.announce(announcement)
        return frozenset(self._watchers)

    async def acknowledge(self, watcher: Watcher, ack: pb.Acknowledgement) -> None:
        """Note that a sampler has a version active."""
        key = (ack.run_id, ack.version)
        watcher.held.add(key)
        self._acks[key][watcher.sampler_id] = ack
        await self._notify()

    async def refuse(self, watcher: Watcher, refusal: pb.Refusal) -> None:
        """Note that a sampler could not load a version."""
        _log.warning(
            "version refused",
            sampler=watcher.sampler_id,
            run=refusal.run_id,
            version=refusal.version,
            reason=refusal.reason,
        )
        self._refusals[refusal.run_id, refusal.version][watcher.sampler_id] = refusal.reason
        await self._notify()

    def release(self, watcher: Watcher, key: VersionKey) -> None:
        """Note that a sampler no longer holds a version."""
        watcher.held.discard(key)

    def leased(self) -> Set[VersionKey]:
        """Return the versions that some watcher holds."""
        return frozenset(key for watcher in self._watchers.values() for key in watcher.held)

    def forget_run(self, run_id: str) -> None:
        """Tell every watcher that a run is gone."""
        self._newest.pop(run_id, None)
        for key in [key for key in self._acks if key[0] == run_id]:
            del self._acks[key]
        for watcher in self._watchers.values():
            watcher.outbox.put_nowait(pb.WatchVersionsResponse(run_deleted=pb.RunDeleted(run_id=run_id)))

    def forget_version(self, key: VersionKey) -> None:
        """Drop what was said of a version."""
        self._acks.pop(key, None)
        self._refusals.pop(key, None)

    async def wait(
        self, key: VersionKey, policy: AckPolicy, expected: Set[str], seconds: float
    ) -> list[pb.Acknowledgement]:
        """Wait until a version is acknowledged as `policy` asks; `expected` watched when it was announced.

        ALL waits for each of them that still watches, and for one at least. Raises AckTimeout, also where a sampler
        could not load it for the moment, or the error with which the version was refused.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._is_settled(key, policy, expected))
        except TimeoutError:
            facts = {"version": str(key[1]), "acknowledged": str(len(self._acks[key]))}
            message = "{acknowledged} sampler(s) acknowledged version {version}; it exists all the same"
            raise errors.AckTimeout(message.format(**facts), metadata=facts) from None
        except errors.Unavailable as refusal:
            # The version exists: this must not look as if the command could be sent again.
            message = f"a sampler could not load version {key[1]} now ({refusal.reason}); it exists all the same"
            raise errors.AckTimeout(message, metadata={"version": str(key[1])}) from refusal
        return list(self._acks[key].values())

    def _is_settled(self, key: VersionKey, policy: AckPolicy, expected: Set[str]) -> bool:
        acknowledged, refused = self._acks[key].keys(), self._refusals[key]
        watching = expected & self._watchers.keys()
        refusing = watching & refused.keys()
        if refusing and (policy is AckPolicy.ALL or refusing == watching):
            reason = next(iter(refused.values()))
            raise errors.CATALOG.get(reason, errors.Internal)(f"a sampler refused version {key[1]}")
        if policy is AckPolicy.ANY:
            return bool(acknowledged)
        return bool(acknowledged) and watching <= acknowledged

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

"""Who watches, what they hold, and what they said of each version.

The trainer keeps no list of samplers beyond this.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from paceline import errors
from paceline.log import get_logger
from paceline.types import ServedModel
from paceline.weights import served_model
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
    held: dict[VersionKey, str]
    """What it holds, with the SHA-256 that it says; empty where it does not say."""
    joins_group: bool = False
    """Whether it is to be in the process group over which versions are broadcast."""
    links_staged: bool = False
    """Whether it wants to hear of versions as soon as their files are staged."""
    instance: str = ""
    """Tells a sampler that watches again from another of the same name; empty where it does not say."""
    outbox: asyncio.Queue[pb.WatchVersionsResponse | errors.PacelineError] = field(default_factory=asyncio.Queue)
    """What it is told; an error ends its watch."""

    def announce(self, announcement: pb.Announcement) -> None:
        """Tell it of a version."""
        self.outbox.put_nowait(pb.WatchVersionsResponse(announcement=announcement))

    def needs(self, model: ServedModel) -> bool:
        """Whether it is to hear of a run's newest version: it lacks these bytes, or takes another for the newest."""
        others = (version for run_id, version in self.held if run_id == model.run_id)
        held = self.held.get((model.run_id, model.version))
        return held not in {"", model.sha256} or max(others, default=0) > model.version


class WatchHub:
    """Announces versions and gathers what samplers answer.

    An acknowledgement counts only where the sampler says the SHA-256 that was announced.
    """

    def __init__(self) -> None:
        self._watchers: dict[str, Watcher] = {}
        self._newest: dict[str, pb.Announcement] = {}
        self._announced: dict[VersionKey, str] = {}
        """SHA-256 of every version that was announced."""
        self._acks: dict[VersionKey, dict[str, pb.Acknowledgement]] = defaultdict(dict)
        self._refusals: dict[VersionKey, dict[str, pb.Refusal]] = defaultdict(dict)
        self._ended: set[str] = set()
        """Runs that are being deleted."""
        self._changed = asyncio.Condition()

    def count(self) -> int:
        """Return how many watch."""
        return len(self._watchers)

    def watchers(self) -> list[Watcher]:
        """Return who watches."""
        return list(self._watchers.values())

    async def join(self, watcher: Watcher) -> None:
        """Take in a watcher and announce to it what is newer than what it holds, or other bytes than those.

        A sampler that watches again takes its own place, and its older watch ends. Raises SamplerExists where another
        sampler has the name.
        """
        older = self._watchers.get(watcher.sampler_id)
        if older is not None:
            if older.instance and watcher.instance and older.instance != watcher.instance:
                raise errors.SamplerExists(
                    f"another sampler watches as {watcher.sampler_id}; give each a name of its own",
                    field="hello.sampler_id",
                )
            _log.warning("sampler watches anew; its older watch ends", sampler=watcher.sampler_id)
            older.outbox.put_nowait(errors.SamplerExists("this sampler watches by a newer call", field="hello"))
        self._watchers[watcher.sampler_id] = watcher
        for announcement in self._newest.values():
            if watcher.needs(served_model(announcement.manifest)):
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
        self._announced[model.run_id, model.version] = model.sha256
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
        """Note that a sampler has a version active, if it has the bytes that were announced.

        One that nobody announced, such as a version that was pushed, is the sampler's own: it is kept for it, no more.
        """
        key = (ack.run_id, ack.version)
        announced = self._announced.get(key)
        if announced not in {None, ack.sha256}:
            message = f"serves {ack.sha256 or 'unnamed bytes'} as version {ack.version}, which is {announced}"
            reason = errors.ChecksumMismatch.reason
            refusal = pb.Refusal(run_id=ack.run_id, version=ack.version, reason=reason, message=message)
            await self.refuse(watcher, refusal)
            return
        watcher.held[key] = ack.sha256
        if announced is not None:
            self._acks[key][watcher.sampler_id] = ack
            self._refusals[key].pop(watcher.sampler_id, None)
        await self._notify()

    async def refuse(self, watcher: Watcher, refusal: pb.Refusal) -> None:
        """Note that a sampler could not load a version, or cannot yet."""
        _log.warning(
            "version refused",
            sampler=watcher.sampler_id,
            run=refusal.run_id,
            version=refusal.version,
            reason=refusal.reason,
            message=refusal.message,
            pending=refusal.pending,
        )
        self._refusals[refusal.run_id, refusal.version][watcher.sampler_id] = refusal
        await self._notify()

    def release(self, watcher: Watcher, key: VersionKey) -> None:
        """Note that a sampler no longer holds a version."""
        watcher.held.pop(key, None)

    def counts(self, watcher: Watcher, key: VersionKey) -> bool:
        """Whether a sampler has acknowledged what was announced as this version."""
        return watcher.sampler_id in self._acks.get(key, {})

    def is_gone(self, watcher: Watcher) -> bool:
        """Whether no sampler of this name watches."""
        return watcher.sampler_id not in self._watchers

    def leased(self) -> Set[VersionKey]:
        """Return the versions that some watcher holds."""
        return frozenset(chain.from_iterable(watcher.held for watcher in self._watchers.values()))

    async def end_waits(self, run_id: str) -> None:
        """Wait for no more acknowledgements of a run's versions."""
        self._ended.add(run_id)
        await self._notify()

    def forget_run(self, run_id: str) -> None:
        """Tell every watcher that a run is gone."""
        self._newest.pop(run_id, None)
        self._ended.discard(run_id)
        for key in [key for key in (*self._announced, *self._acks, *self._refusals) if key[0] == run_id]:
            self.forget_version(key)
        for watcher in self._watchers.values():
            watcher.outbox.put_nowait(pb.WatchVersionsResponse(run_deleted=pb.RunDeleted(run_id=run_id)))

    def forget_version(self, key: VersionKey) -> None:
        """Drop what was said of a version."""
        self._announced.pop(key, None)
        self._acks.pop(key, None)
        self._refusals.pop(key, None)

    async def wait(
        self, key: VersionKey, policy: AckPolicy, expected: Set[str], seconds: float
    ) -> list[pb.Acknowledgement]:
        """Wait until a version is acknowledged as `policy` asks; `expected` watched when it was announced.

        ALL waits for each of them that still watches, and for one at least. The version exists whatever happens here:
        raises AckTimeout, also where a sampler could not load it for the moment, or the error with which a sampler
        refused it for good. Both name the version and the samplers that lack it.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._is_settled(key, policy, expected))
        except TimeoutError:
            raise errors.AckTimeout(self._so_far(key, expected), metadata=self._facts(key, expected)) from None
        return list(self._acks[key].values())

    def _is_settled(self, key: VersionKey, policy: AckPolicy, expected: Set[str]) -> bool:
        if key[0] in self._ended:
            raise errors.RunNotFound("the run was deleted", field="run_id")
        acknowledged = self._acks[key].keys()
        watching = expected & self._watchers.keys()
        refusing = {name for name, refusal in self._refusals[key].items() if name in watching and not refusal.pending}
        if refusing and (policy is AckPolicy.ALL or refusing == watching):
            raise self._refused(key, min(refusing), expected)
        if policy is AckPolicy.ANY:
            return bool(acknowledged)
        return bool(acknowledged) and watching <= acknowledged

    def _refused(self, key: VersionKey, sampler_id: str, expected: Set[str]) -> errors.PacelineError:
        """Return what a publish says of a sampler's refusal.

        What may pass by itself must not look as if the command had not been executed and could be sent again.
        """
        refusal, facts = self._refusals[key][sampler_id], self._facts(key, expected)
        kind = errors.CATALOG.get(refusal.reason, errors.Internal)
        if issubclass(kind, errors.Unavailable | errors.Exhausted | errors.TimedOut):
            return errors.AckTimeout(self._so_far(key, expected), metadata=facts)
        said = f": {refusal.message}" if refusal.message else ""
        return kind(
            f"version {key[1]} exists, and sampler {sampler_id} refused it ({refusal.reason}){said}", metadata=facts
        )

    def _so_far(self, key: VersionKey, expected: Set[str]) -> str:
        missing = [
            f"{name} ({refusal.reason})" if (refusal := self._refusals[key].get(name)) else name
            for name in self._missing(key, expected)
        ]
        rest = f", and not yet by {', '.join(missing)}" if missing else ""
        return f"version {key[1]} exists; it is acknowledged by {len(self._acks[key])} sampler(s){rest}"

    def _facts(self, key: VersionKey, expected: Set[str]) -> dict[str, str]:
        missing = ",".join(self._missing(key, expected))
        return {"version": str(key[1]), "acknowledged": str(len(self._acks[key])), "missing": missing}

    def _missing(self, key: VersionKey, expected: Set[str]) -> list[str]:
        """Return those that watch, heard of a version, and have not acknowledged it."""
        return sorted((expected & self._watchers.keys()) - self._acks[key].keys())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

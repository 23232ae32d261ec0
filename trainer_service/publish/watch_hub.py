"""The watching samplers, the versions that they hold, and their answers to each version.

The trainer has no other list of samplers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from time import monotonic

from paceline import errors
from paceline.codec.models import served_model_from_proto
from paceline.log import get_logger
from paceline.types import AdapterGroup, RunParameters, ServedModel
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.publish.servable import Obstacle, ServingLimits, obstacle

VersionKey = tuple[str, int]
"""run_id and version number."""

_NO_LIMITS = ServingLimits()
"""Those of a sampler that reports none."""

_log = get_logger(__name__)


class AckPolicy(Enum):
    """Whose acknowledgement a publish waits for. The values are those on the wire."""

    NONE = 1
    ANY = 2
    ALL = 3


@dataclass(slots=True, eq=False)
class Watcher:
    """A watching sampler."""

    sampler_id: str
    held: dict[VersionKey, str]
    """Version that the sampler holds -> BLAKE3 that it reported; empty if it reported none."""
    newest: dict[str, int] = field(default_factory=dict)
    """Run -> version that the sampler took for the newest when it joined, if it said so."""
    joins_group: bool = False
    """Whether the sampler joins the process group that broadcasts versions."""
    links_staged: bool = False
    """Whether the sampler wants to be notified of versions as soon as their files are staged."""
    needs_volume: bool = False
    """Whether the sampler loads versions only from the checkpoint volume."""
    limits: ServingLimits = _NO_LIMITS
    """What the sampler serves."""
    instance: str = ""
    """Distinguishes a sampler that reconnects from another one of the same name; empty if not reported."""
    outbox: asyncio.Queue[pb.WatchVersionsResponse | errors.PacelineError | None] = field(default_factory=asyncio.Queue)
    """Messages to the sampler; an error or None ends its watch."""
    _behind: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Run -> its newest version that was announced and not acknowledged, and since when the sampler stands still."""

    def announce(self, announcement: pb.Announcement) -> None:
        """Queue the announcement of a version."""
        model = announcement.manifest.model
        if self.held.get((model.run_id, model.version)) != model.blake3:
            version, since = self._behind.get(model.run_id, (0, monotonic()))
            self._behind[model.run_id] = max(version, model.version), since
        self.outbox.put_nowait(pb.WatchVersionsResponse(announcement=announcement))

    def forget_run(self, run_id: str) -> None:
        """Queue the message that a run was deleted."""
        self._behind.pop(run_id, None)
        self.outbox.put_nowait(pb.WatchVersionsResponse(run_deleted=pb.RunDeleted(run_id=run_id)))

    def acknowledged(self, key: VersionKey, blake3: str) -> None:
        """Record that the sampler holds a version."""
        self.held[key] = blake3
        run_id, number = key
        version, _ = self._behind.get(run_id, (0, 0.0))
        if number >= version:
            self._behind.pop(run_id, None)
        else:  # it follows, though later ones were announced meanwhile
            self._behind[run_id] = version, monotonic()

    def seconds_behind(self) -> float:
        """Return how long the sampler has lacked a run's newest version and loaded none of that run's; 0 for none."""
        return max((monotonic() - since for _, since in list(self._behind.values())), default=0.0)

    def needs(self, model: ServedModel) -> bool:
        """Return whether to announce a run's newest version to a sampler that joins.

        It lacks the bytes, holds a higher number, or takes an older version for the newest: it may hold this one only
        because a request named it.
        """
        if self.newest.get(model.run_id) != model.version:
            return True
        others = (version for run_id, version in self.held if run_id == model.run_id)
        held = self.held.get((model.run_id, model.version))
        return held not in {"", model.blake3} or max(others, default=0) > model.version


class WatchHub:
    """Announces versions and collects the samplers' answers.

    An acknowledgement counts only if it carries the BLAKE3 that was announced.
    """

    def __init__(self) -> None:
        self._watchers: dict[str, Watcher] = {}
        self._newest: dict[str, pb.Announcement] = {}
        self._newest_on_volume: dict[str, pb.Announcement] = {}
        self._announced: dict[VersionKey, str] = {}
        """BLAKE3 of every announced version."""
        self._acks: dict[VersionKey, dict[str, pb.Acknowledgement]] = defaultdict(dict)
        self._refusals: dict[VersionKey, dict[str, pb.Refusal]] = defaultdict(dict)
        self._ended: set[str] = set()
        """Runs that are being deleted."""
        self._deleted: set[str] = set()
        """Runs that were deleted, also before this process started, for samplers that do not watch at that time."""
        self._changed = asyncio.Condition()

        self.on_acknowledged: Callable[[str, int], object] = lambda run_id, version: None
        """Called with the run and the number of an announced version that a sampler has loaded."""

    def count(self) -> int:
        """Return the number of watchers."""
        return len(self._watchers)

    def watchers(self) -> list[Watcher]:
        """Return all watchers."""
        return list(self._watchers.values())

    def obstacle(
        self, parameters: RunParameters, modules: Collection[str], groups: Sequence[AdapterGroup]
    ) -> Obstacle | None:
        """Return why no watching sampler can serve a run that adapts `modules`.

        None if one of them can, or if none watches. `groups` are those of the base model.
        """
        found = None
        for watcher in self._watchers.values():
            one = obstacle(watcher.sampler_id, watcher.limits, parameters, modules, groups)
            if one is None:
                return None
            found = found or one
        return found

    def unserved_modules(self) -> Set[str]:
        """Return the modules of the base model on which none of the watching samplers serves an adapter."""
        unserved = [watcher.limits.unserved_modules for watcher in self._watchers.values()]
        return frozenset.intersection(*unserved) if unserved else frozenset()

    async def join(self, watcher: Watcher) -> None:
        """Add a watcher and announce the newest versions to it, unless it serves them as such already.

        If the sampler already watches, its older watch ends. Raises SamplerExists if another sampler has the name.
        """
        older = self._watchers.get(watcher.sampler_id)
        if older is not None:
            # A process that connects again has the same instance. Two processes would replace each other forever.
            if older.instance and watcher.instance and older.instance != watcher.instance:
                raise errors.SamplerExists(
                    f"another sampler has the name {watcher.sampler_id}; give each a name of its own",
                    field="hello.sampler_id",
                )
            _log.warning("sampler reconnected; closing its older watch", sampler=watcher.sampler_id)
            older.outbox.put_nowait(errors.SamplerExists("superseded by a newer watch of this sampler", field="hello"))
        self._watchers[watcher.sampler_id] = watcher
        for run_id in {run_id for run_id, _ in watcher.held} & self._deleted:
            watcher.forget_run(run_id)
        for key in watcher.held:
            self._count_held(watcher, key)
        usable = self._newest_on_volume if watcher.needs_volume else self._newest
        for run_id, announcement in usable.items():
            if watcher.needs(served_model_from_proto(announcement.manifest.model)):
                announcement.newest_version = max(announcement.newest_version, self.newest(run_id))
                watcher.announce(announcement)
        _log.info("sampler watches", sampler=watcher.sampler_id, holds=len(watcher.held))
        await self._notify()

    def close(self) -> None:
        """End every watch. The samplers reconnect by themselves."""
        for watcher in self._watchers.values():
            watcher.outbox.put_nowait(None)

    async def leave(self, watcher: Watcher) -> bool:
        """Remove a watcher; its leases end. Return whether no other watcher has its name."""
        if self._watchers.get(watcher.sampler_id) is watcher:
            del self._watchers[watcher.sampler_id]
        _log.info("sampler left", sampler=watcher.sampler_id)
        await self._notify()
        return watcher.sampler_id not in self._watchers

    def notify_staged(self, staged: pb.Staged) -> None:
        """Notify the samplers that share this machine's memory of a version that is about to exist."""
        for watcher in self._watchers.values():
            if watcher.links_staged:
                watcher.outbox.put_nowait(pb.WatchVersionsResponse(staged=staged))

    def newest(self, run_id: str) -> int:
        """Return the newest version of a run that was announced; 0 if none was."""
        return _version(self._newest.get(run_id))

    def announce(self, announcement: pb.Announcement) -> frozenset[str]:
        """Announce a version to every watcher; return their names."""
        model = announcement.manifest.model
        self._announced[model.run_id, model.version] = model.blake3
        if self.newest(model.run_id) <= model.version:
            self._newest[model.run_id] = _for_later(announcement)
        if announcement.volume_path:
            self.remember_on_volume(announcement)
        for watcher in self._watchers.values():
            watcher.announce(announcement)
            self._count_held(watcher, (model.run_id, model.version))
        return frozenset(self._watchers)

    def remember_on_volume(self, announcement: pb.Announcement) -> None:
        """Announce a version, unless a newer one is on the volume, to samplers that join later and need the volume."""
        model = announcement.manifest.model
        self._announced[model.run_id, model.version] = model.blake3
        if _version(self._newest_on_volume.get(model.run_id)) <= model.version:
            self._newest_on_volume[model.run_id] = _for_later(announcement)

    async def acknowledge(self, watcher: Watcher, ack: pb.Acknowledgement) -> bool:
        """Record that a version is active in a sampler, if its bytes are the announced ones.

        A version that was not announced, such as a pushed one, is the sampler's own: it is only recorded as held.
        Returns whether the sampler has acknowledged the announced version.
        """
        key = (ack.run_id, ack.version)
        announced = self._announced.get(key)
        if announced not in {None, ack.blake3}:
            message = f"serves {ack.blake3 or 'unnamed bytes'} as version {ack.version}, which is {announced}"
            reason = errors.ChecksumMismatch.reason
            refusal = pb.Refusal(run_id=ack.run_id, version=ack.version, reason=reason, message=message)
            await self.refuse(watcher, refusal)
        else:
            watcher.acknowledged(key, ack.blake3)
            if announced is not None:
                self._acks[key][watcher.sampler_id] = ack
                self._refusals[key].pop(watcher.sampler_id, None)
                self.on_acknowledged(*key)
            await self._notify()
        return watcher.sampler_id in self._acks.get(key, {})

    def is_acknowledged(self, watcher: Watcher, key: VersionKey) -> bool:
        """Return whether a sampler serves the bytes of a version that were announced."""
        return watcher.sampler_id in self._acks.get(key, {})

    def _count_held(self, watcher: Watcher, key: VersionKey) -> None:
        """Count a version as acknowledged if the sampler holds the announced bytes.

        Its acknowledgement may have been lost with an earlier watch, or with an earlier process of the trainer. It does
        not send another.
        """
        announced = self._announced.get(key)
        if announced and watcher.held.get(key) == announced:
            run_id, version = key
            ack = pb.Acknowledgement(run_id=run_id, version=version, blake3=announced, sampler_id=watcher.sampler_id)
            self._acks[key].setdefault(watcher.sampler_id, ack)
            self._refusals[key].pop(watcher.sampler_id, None)

    async def refuse(self, watcher: Watcher, refusal: pb.Refusal) -> None:
        """Record that a sampler could not load a version, or cannot load it yet."""
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
        """Record that a sampler no longer holds a version."""
        watcher.held.pop(key, None)

    def leased(self) -> Set[VersionKey]:
        """Return the versions that at least one watcher holds."""
        return frozenset(chain.from_iterable(watcher.held for watcher in self._watchers.values()))

    async def cancel_waits(self, run_id: str) -> None:
        """Stop waiting for acknowledgements of a run's versions."""
        self._ended.add(run_id)
        await self._notify()

    def forget_run(self, run_id: str) -> None:
        """Forget a run and notify every watcher that it was deleted, also one that holds it and joins later."""
        self._deleted.add(run_id)
        self._newest.pop(run_id, None)
        self._newest_on_volume.pop(run_id, None)
        self._ended.discard(run_id)
        for key in [key for key in (*self._announced, *self._acks, *self._refusals) if key[0] == run_id]:
            self.forget_version(key)
        for watcher in self._watchers.values():
            watcher.forget_run(run_id)

    def remember_deleted(self, run_ids: Set[str]) -> None:
        """Notify samplers that hold one of these runs, and join later, that it was deleted."""
        self._deleted |= run_ids

    def forget_version(self, key: VersionKey) -> None:
        """Forget a version's announcement and the answers to it."""
        self._announced.pop(key, None)
        self._acks.pop(key, None)
        self._refusals.pop(key, None)

    async def wait(
        self, key: VersionKey, policy: AckPolicy, expected: Set[str], seconds: float
    ) -> list[pb.Acknowledgement]:
        """Wait until a version is acknowledged as `policy` requires; `expected` watched when it was announced.

        ALL waits for each of these that still watches, and for at least one. Raises AckTimeout, also if a sampler
        cannot load the version for the moment, or the error with which a sampler refused it for good. Both name the
        version, which exists in any case, and the samplers that lack it.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._is_settled(key, policy, expected))
        except TimeoutError:
            if self._is_settled(key, policy, expected):  # since the wait was ended
                return list(self._acks[key].values())
            raise errors.AckTimeout(self._so_far(key, expected), metadata=self._metadata(key, expected)) from None
        return list(self._acks[key].values())

    def _is_settled(self, key: VersionKey, policy: AckPolicy, expected: Set[str]) -> bool:
        if key[0] in self._ended:
            raise errors.RunNotFound.deleted("run_id")
        acknowledged = self._acks[key].keys()
        watching = expected & self._watchers.keys()
        # A sampler that cannot load it for the moment may still acknowledge it; only a final refusal counts.
        refusing = {name for name, refusal in self._refusals[key].items() if name in watching and not refusal.pending}
        if refusing and (policy is AckPolicy.ALL or refusing == watching):
            raise self._refused(key, min(refusing), expected)
        if policy is AckPolicy.ANY:
            return bool(acknowledged)
        return bool(acknowledged) and watching <= acknowledged

    def _refused(self, key: VersionKey, sampler_id: str, expected: Set[str]) -> errors.PacelineError:
        """Return the error that a publish raises for a sampler's refusal.

        A temporary problem becomes AckTimeout: it must not look as if the command had not been executed and could be
        sent again.
        """
        refusal, metadata = self._refusals[key][sampler_id], self._metadata(key, expected)
        kind = errors.CATALOG.get(refusal.reason, errors.Internal)
        if issubclass(kind, errors.Unavailable | errors.Exhausted | errors.TimedOut):
            return errors.AckTimeout(self._so_far(key, expected), metadata=metadata)
        said = f": {refusal.message}" if refusal.message else ""
        return kind(
            f"version {key[1]} exists, and sampler {sampler_id} refused it ({refusal.reason}){said}", metadata=metadata
        )

    def _so_far(self, key: VersionKey, expected: Set[str]) -> str:
        missing = [
            f"{name} ({refusal.reason})" if (refusal := self._refusals[key].get(name)) else name
            for name in self._missing(key, expected)
        ]
        rest = f", and not yet by {', '.join(missing)}" if missing else ""
        return f"version {key[1]} exists; it is acknowledged by {len(self._acks[key])} sampler(s){rest}"

    def _metadata(self, key: VersionKey, expected: Set[str]) -> dict[str, str]:
        missing = ",".join(self._missing(key, expected))
        return {"version": str(key[1]), "acknowledged": str(len(self._acks[key])), "missing": missing}

    def _missing(self, key: VersionKey, expected: Set[str]) -> list[str]:
        """Return the watching samplers that were notified of a version and have not acknowledged it."""
        return sorted((expected & self._watchers.keys()) - self._acks[key].keys())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _for_later(announcement: pb.Announcement) -> pb.Announcement:
    """Return an announcement for samplers that join later: they are not in the group that receives its broadcast."""
    return pb.Announcement(
        manifest=announcement.manifest,
        volume_path=announcement.volume_path,
        newest_version=announcement.newest_version,
    )


def _version(announcement: pb.Announcement | None) -> int:
    """Return the announced version; 0 for none."""
    return announcement.manifest.model.version if announcement is not None else 0

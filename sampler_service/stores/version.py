"""A version's states in a sampler, the moves between them, and the table of all versions that a store has."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.types import ServedModel
from sampler_service.engine.protocol import Adapter, LoadTimes
from sampler_service.transports.base import StagedAdapter, VersionKey


class VersionState(Enum):
    """Where a version is on its way through a sampler."""

    ARRIVING = auto()
    """Its files are here; it waits for a place in the engine, or the engine is loading it."""
    VERIFYING = auto()
    """The engine has it, but its bytes are not verified: no request finds it."""
    ACTIVE = auto()
    """Requests find it."""
    RETIRED = auto()
    """Requests find it until its last one ends; then it leaves."""
    DISPLACED = auto()
    """Other content has its number: no new request finds it, and it leaves when its last one ends."""
    EVICTING = auto()
    """The engine is dropping it, which takes a step; then its files wait on disk."""
    LEAVING = auto()
    """The engine is dropping it; then its files are removed."""
    LOST = auto()
    """The engine died, and its successor could not load it."""
    ON_DISK = auto()
    """Its files wait until it is requested again."""
    RELEASED = auto()
    """It is gone."""


_State = VersionState

MOVES: Mapping[VersionState, Set[VersionState]] = {
    _State.ARRIVING: {_State.VERIFYING, _State.ON_DISK, _State.RELEASED},
    _State.VERIFYING: {_State.ACTIVE, _State.LEAVING, _State.LOST},
    # Weights that are written over, as in a store of one model, are released at once.
    _State.ACTIVE: {_State.RETIRED, _State.DISPLACED, _State.EVICTING, _State.LOST, _State.RELEASED},
    _State.RETIRED: {_State.DISPLACED, _State.LEAVING, _State.RELEASED},
    _State.DISPLACED: {_State.LEAVING},
    # A version that is unloaded, displaced or deleted while it is evicted leaves. One whose place on disk is taken, or
    # that has none, is released.
    _State.EVICTING: {_State.ON_DISK, _State.LEAVING, _State.RELEASED},
    _State.LEAVING: {_State.RELEASED},
    _State.LOST: {_State.RELEASED},
    _State.ON_DISK: {_State.ARRIVING, _State.RELEASED},
    _State.RELEASED: set(),
}
"""The moves that are permitted, from each state."""

FINDABLE = frozenset({_State.ACTIVE, _State.RETIRED})
"""Requests find the version; of each key there is at most one."""

HELD = FINDABLE | {_State.EVICTING, _State.ON_DISK}
"""The trainer keeps the version for this sampler."""

LEFT_WHEN_IDLE = frozenset({_State.RETIRED, _State.DISPLACED})
"""The version leaves when its last request ends."""

UNLOADING = frozenset({_State.EVICTING, _State.LEAVING})
"""The engine is dropping the version."""

IN_ENGINE = FINDABLE | UNLOADING | {_State.VERIFYING, _State.DISPLACED}
"""The version occupies a place in the engine."""


@dataclass(slots=True, eq=False)
class Version:
    """An adapter, or a whole model, and its state. It has one record from its arrival until it is released.

    Only `VersionTable.move` changes `state` and `was_active`.
    """

    staged: StagedAdapter
    """Its files; they move from memory to disk while it is ON_DISK."""
    state: VersionState = VersionState.ARRIVING
    was_active: bool = False
    """Whether requests could find it. Then the trainer keeps it also while it returns from disk, and hears of its
    release."""
    adapter: Adapter = field(init=False)
    """Its id and name in the engine, new each time it is loaded; unset until then."""
    times: LoadTimes = field(init=False)
    requests_in_flight: int = 0
    is_announced: bool = False
    """Whether an announcement of it has been answered; the trainer repeats that for the copy on the volume."""

    @property
    def key(self) -> VersionKey:
        return self.staged.key

    @property
    def served(self) -> ServedModel:
        """The model as responses name it; its BLAKE3 may be empty until it is ACTIVE."""
        return self.staged.served

    @property
    def tenant(self) -> str:
        """The owner."""
        return self.staged.manifest.tenant

    @property
    def is_held(self) -> bool:
        """Whether the trainer keeps it for this sampler."""
        returns = self.was_active and self.state in {VersionState.ARRIVING, VersionState.VERIFYING}
        return returns or self.state in HELD


class VersionTable:
    """All versions of a store that are not released, those first that were moved or used longest ago."""

    def __init__(self) -> None:
        self._versions: OrderedDict[Version, None] = OrderedDict()
        self._findable: dict[VersionKey, Version] = {}
        """Those in a FINDABLE state, because every request looks one up."""
        self._moved = asyncio.Event()
        """Replaced by a new one with each move, so that who waits sees every move after its last look."""

    def __iter__(self) -> Iterator[Version]:
        return iter(list(self._versions))

    def add(self, staged: StagedAdapter) -> Version:
        """Add a version whose files are here."""
        version = Version(staged)
        self._versions[version] = None
        return version

    def move(self, version: Version, state: VersionState) -> None:
        """Change a version's state and wake who waits for a move. Raises RuntimeError for one that is not permitted."""
        if state not in MOVES[version.state]:
            raise RuntimeError(f"{version.key.ref()} cannot move from {version.state.name} to {state.name}")
        if state is VersionState.ACTIVE and version.key in self._findable:
            raise RuntimeError(f"{version.key.ref()} is active already, from other files")
        if version.state in FINDABLE and state not in FINDABLE:
            del self._findable[version.key]
        version.state = state
        if state is VersionState.ACTIVE:
            self._findable[version.key] = version
            version.was_active = True
        if state is VersionState.RELEASED:
            del self._versions[version]
        elif state is not VersionState.RETIRED:  # retiring is no use: a checkpoint's last used content is served
            self._versions.move_to_end(version)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def moved(self) -> None:
        """Wait for the next move of any version."""
        await self._moved.wait()

    def use(self, version: Version) -> None:
        """Count a request, and note that the version is the one used last."""
        version.requests_in_flight += 1
        self._versions.move_to_end(version)

    def find(self, key: VersionKey) -> Version | None:
        """Return the version with this key that requests find, if any."""
        return self._findable.get(key)

    def findable(self) -> list[Version]:
        """Return the versions that requests find."""
        return self.of(FINDABLE)

    def num_findable(self) -> int:
        return len(self._findable)

    def of(self, states: Set[VersionState], key: VersionKey | None = None) -> list[Version]:
        """Return the versions in any of these states; with `key`, only those with this key."""
        return [version for version in self._versions if version.state in states and key in {None, version.key}]

    def held(self, key: VersionKey | None = None) -> list[Version]:
        """Return the versions that the trainer keeps for this sampler; with `key`, only those with this key."""
        return [version for version in self._versions if version.is_held and key in {None, version.key}]

"""Prefetching: loads versions staged in this machine's memory while the trainer still computes their checksums."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from paceline import errors
from paceline.weights import is_sealed, served_model
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.singleflight import arriving_within
from sampler_service.transports.version_keys import VersionKey


@dataclass(slots=True, eq=False)
class Offer:
    """A version's file, and its manifest once the trainer has announced it."""

    draft: pb.Manifest
    """The manifest without checksums."""
    path: Path
    seconds: float
    """How long the announcement may take."""
    announced: asyncio.Future[pb.Manifest] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def sealed(self) -> pb.Manifest:
        """Wait for the announced manifest. Raises TrainerUnavailable on timeout, ChecksumMismatch if it differs."""
        async with arriving_within(self.seconds):
            manifest = await asyncio.shield(self.announced)
        if not is_sealed(manifest, self.draft):
            raise errors.ChecksumMismatch("the version was announced with another manifest than it was offered with")
        return manifest

    def withdraw(self) -> None:
        """Fail the waiters: the trainer disconnected, offered another version, or deleted the run."""
        if not self.announced.done():
            self.announced.set_exception(errors.TrainerUnavailable("the version was not announced; try again"))
            self.announced.exception()  # mark it as retrieved: there may be no waiters


class Offers:
    """The newest offer of each run."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the timeout of an announcement after its offer."""
        self._seconds = seconds
        self._offers: dict[str, Offer] = {}

    def expect(self, staged: pb.Staged) -> VersionKey:
        """Register an offer, replacing the run's previous one."""
        served = served_model(staged.manifest)
        self.drop(served.run_id)
        self._offers[served.run_id] = Offer(staged.manifest, Path(staged.staged_path), self._seconds)
        return VersionKey.of(served)

    def find(self, key: VersionKey) -> Offer | None:
        """Return the offer of a version, if any."""
        offer = self._offers.get(key.run_id)
        return offer if offer is not None and offer.draft.model.version == key.version else None

    def announced(self, manifest: pb.Manifest) -> None:
        """Pass a version's manifest to the waiters of its offer."""
        offer = self.find(VersionKey.of(served_model(manifest)))
        if offer is not None and not offer.announced.done():
            offer.announced.set_result(manifest)

    def drop(self, run_id: str) -> None:
        """Drop a run's offer and fail its waiters."""
        offer = self._offers.pop(run_id, None)
        if offer is not None:
            offer.withdraw()

    def clear(self) -> None:
        """Drop all offers: the trainer that made them disconnected."""
        for run_id in list(self._offers):
            self.drop(run_id)

"""Weights that requests sample from, however many of them an engine holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from sampler_service.engine.protocol import Adapter
from sampler_service.stores.leases import Lease, Listeners, LoadedVersion
from sampler_service.transports.base import StagedAdapter
from sampler_service.transports.version_keys import VersionKey


class Versions(Protocol):
    """What the engine holds. VersionRegistry: adapters beside each other. ModelSlot: one whole model at a time."""

    listeners: Listeners

    def __len__(self) -> int:
        """Return how many versions and checkpoints are loaded; the base model does not count."""
        ...

    def __iter__(self) -> Iterator[LoadedVersion]:
        """Yield what is loaded."""
        ...

    def find(self, key: VersionKey) -> LoadedVersion | None:
        """Return what is loaded under a key."""
        ...

    def held(self) -> Iterator[ServedModel]:
        """Yield what the trainer is to keep for this sampler: what is loaded, and what waits to be loaded again."""
        ...

    def lease(self, ref: ModelRef, tenant: str) -> AbstractAsyncContextManager[Lease]:
        """Keep the weights that `ref` means loaded while the block runs, bringing them first if need be."""
        ...

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> LoadedVersion:
        """Bring weights and load them."""
        ...

    async def install(self, staged: StagedAdapter) -> LoadedVersion:
        """Load weights that were pushed. Their files are its own from here on, also when this raises."""
        ...

    def serves(self, ref: ModelRef) -> bool:
        """Return whether a request for weights is answered without another's having to give way to them."""
        ...

    def displace(self, served: ServedModel) -> None:
        """Let go of other content than this under its number: from here on nobody begins with it."""
        ...

    def unload(self, ref: ModelRef, tenant: str) -> None:
        """Let weights go once their last request ends."""
        ...

    def forget_run(self, run_id: str) -> None:
        """Let everything of a deleted run go, as requests end."""
        ...

    def retire_superseded(self, run_id: str) -> None:
        """Let all but the newest versions of a run go."""
        ...

    def revived(self, lost: Sequence[Adapter]) -> None:
        """Take note that the engine was built anew, without the adapters that were lost.

        Of whole models it has the one that it was built from.
        """
        ...

    async def close(self) -> None:
        """End what is under way."""
        ...

"""The protocol of the stores that hold the weights which requests sample from."""

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
    """The weights that the engine holds.

    VersionRegistry holds many adapters, ModelSlot one whole model at a time, InPlaceSlot one that is updated in place.
    """

    listeners: Listeners

    def __len__(self) -> int:
        """Return the number of loaded versions and checkpoints; the base model does not count."""
        ...

    def __iter__(self) -> Iterator[LoadedVersion]:
        """Yield the loaded versions and checkpoints."""
        ...

    def find(self, key: VersionKey) -> LoadedVersion | None:
        """Return the loaded version with this key, if any."""
        ...

    def held(self) -> Iterator[ServedModel]:
        """Yield what the trainer must keep for this sampler: everything that is loaded or waits on disk."""
        ...

    def lease(self, ref: ModelRef, tenant: str) -> AbstractAsyncContextManager[Lease]:
        """Keep the weights that `ref` names loaded while the block runs, fetching them first if necessary."""
        ...

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> LoadedVersion:
        """Fetch weights and load them."""
        ...

    async def install(self, staged: StagedAdapter) -> LoadedVersion:
        """Load weights that were pushed. The store owns their files from now on, even if this raises."""
        ...

    def serves(self, ref: ModelRef) -> bool:
        """Return whether a request for these weights can be answered without replacing the loaded ones."""
        ...

    def displace(self, served: ServedModel) -> None:
        """Displace other content under the same number: no new request uses it."""
        ...

    def unload(self, ref: ModelRef, tenant: str) -> None:
        """Unload weights once their last request ends."""
        ...

    def forget_run(self, run_id: str) -> None:
        """Unload everything of a deleted run as its requests end."""
        ...

    def retire_superseded(self, run_id: str) -> None:
        """Unload all but the newest versions of a run."""
        ...

    def revived(self, lost: Sequence[Adapter]) -> None:
        """Record that the engine was restarted without the `lost` adapters.

        An engine for whole models has the model that it was built from.
        """
        ...

    async def close(self) -> None:
        """Cancel everything in progress."""
        ...

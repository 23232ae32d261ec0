"""The files of whole models: fetched once for all that need them, and removed when nobody does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.background import Background
from sampler_service.stores.base import SharedFetches
from sampler_service.transports.base import Bridge, StagedAdapter, VersionKey


@dataclass(slots=True)
class _Files:
    needs: int = 0
    """Number of those that need the model's files; at zero they are removed."""
    staged: list[StagedAdapter] = field(default_factory=list)
    """Verified files; a tenant and the sampler may have fetched the same model."""


class ModelFiles:
    """Fetches the files of models, and keeps them as long as somebody needs them."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._files: dict[VersionKey, _Files] = {}
        """Those of models that somebody needs."""
        self._fetches: SharedFetches[StagedAdapter] = SharedFetches()
        self._removing = Background("files of a model not removed")

    @contextmanager
    def needed(self, key: VersionKey) -> Iterator[None]:
        """Keep the files of a model while the block runs; once it is loaded the engine does not need them."""
        files = self._files.setdefault(key, _Files())
        files.needs += 1
        try:
            yield
        finally:
            files.needs -= 1
            if not files.needs:
                del self._files[key]
                for staged in files.staged:
                    self._removing.spawn(staged.discard())

    async def fetch(self, key: VersionKey, tenant: str) -> StagedAdapter:
        """Return verified files of a model that the caller needs, fetched if they are not here. Raises as the bridge.

        A fetch continues if its caller is cancelled.
        """
        if (files := self._files.get(key)) is not None and files.staged:
            return files.staged[-1]
        return await self._fetches.join(key, tenant, lambda: self._bring(key, tenant))

    async def close(self) -> None:
        """Cancel the fetches, and finish removing files."""
        await self._fetches.close()
        await self._removing.close()

    async def _bring(self, key: VersionKey, tenant: str) -> StagedAdapter:
        staged = await self._bridge.fetch(key.ref(), tenant)
        await staged.verified()
        with self.needed(key):  # removes the files if all callers were cancelled meanwhile
            self._files[key].staged.append(staged)
        return staged

"""What is remembered of models and checkpoints that are gone, bounded by tenant.

A model's row maps its name to its run's, so it is kept as long as the run or one of its checkpoints exists. What was
attached to a checkpoint is kept as long as the checkpoint exists.
"""

from __future__ import annotations

import asyncio

from gateway.http.models import Models
from gateway.http.tinker.store import Store, save_of
from paceline.background import Background

MOST_GONE_MODELS = 1_000
"""Models of a tenant without a run or a checkpoint that are remembered, the newest ones."""
EVERY = 100
"""Rows of a tenant between two looks at what is gone."""


class Tidying:
    """Deletes the rows of what is gone, in the background."""

    def __init__(self, models: Models, store: Store) -> None:
        self._models = models
        self._store = store
        self._turn = asyncio.Lock()
        self._background = Background("rows of models and checkpoints that are gone were kept; more rows repeat it")

    def added(self, tenant: str, rows: int) -> None:
        """Note that a tenant has so many rows of a kind now, more than before; 0 if they are not more."""
        if rows and rows % EVERY == 0:
            self._background.spawn(self.tidy(tenant))

    async def tidy(self, tenant: str) -> None:
        """Delete the rows of a tenant's models and checkpoints that are gone. Raises the trainer's errors."""
        async with self._turn:
            # Rows first: what they name was made before them, so that what a later list lacks is gone for good.
            models, saves = self._store.models(tenant), self._store.checkpoint_metadata(tenant)
            runs = {run.run_id for run in await self._models.runs(tenant)}
            checkpoints = await self._models.checkpoints(tenant)
            runs |= {checkpoint.run_id for checkpoint in checkpoints}
            gone = [model.model_id for model in models if model.run_id not in runs][MOST_GONE_MODELS:]
            await self._store.forget(gone, saves.keys() - {save_of(checkpoint) for checkpoint in checkpoints})

    async def close(self) -> None:
        """Stop; more rows repeat it."""
        await self._background.close()

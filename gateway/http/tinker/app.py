"""Assemble Tinker's API."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter

from gateway.http.models import Models
from gateway.http.services import Services
from gateway.http.tinker.api import DataPlane
from gateway.http.tinker.catalog import Catalog
from gateway.http.tinker.downloads import Downloads, read_or_make_secret
from gateway.http.tinker.futures import Futures
from gateway.http.tinker.names import Aliases, Names
from gateway.http.tinker.sampling import Sampling
from gateway.http.tinker.sessions import Sessions
from gateway.http.tinker.store import Store
from gateway.http.tinker.training import Training
from gateway.http.tinker.unserved import unserved
from paceline.waiting_bytes import WaitingBytes

PREFIX = "/api/v1"


class TinkerApi:
    """The routes, and the background work behind them."""

    def __init__(
        self,
        services: Services,
        waiting_bytes: WaitingBytes,
        state: Path,
        aliases: Aliases,
        tokenizer: str,
        public_url: str,
        max_body_bytes: int,
    ) -> None:
        """Open the files in `state`. Raises InvalidArgument if one cannot be used."""
        self._store = Store(state / "tinker.sqlite")
        self._futures = Futures(self._store, waiting_bytes)
        self._sessions = Sessions(self._store, self._futures)
        self.names = Names(self._store)
        training = Training(services, self._store, self.names, aliases, self._sessions, max_body_bytes)
        sampling = Sampling(services, self._store, aliases, read_or_make_secret(state / "seeds.secret"))
        for kind in (*training.kinds, sampling.sample):
            self._futures.add(kind)
        downloads = Downloads(services, read_or_make_secret(state / "downloads.secret"), public_url)
        self.models = Models(services, self.names, aliases)
        catalog = Catalog(services, self._store, self.names, self.models, self._sessions, downloads)
        self.routes = APIRouter(prefix=PREFIX)
        self.routes.include_router(
            DataPlane(
                self._store,
                self._sessions,
                self._futures,
                training,
                sampling,
                self.names,
                aliases,
                max_body_bytes,
                tokenizer,
                downloads,
            ).routes()
        )
        self.routes.include_router(catalog.routes())
        self.routes.include_router(downloads.routes())
        self.routes.include_router(unserved())
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Restart the work that an earlier gateway left unfinished."""
        await self._futures.resume()
        self._sweeping = asyncio.create_task(self._sessions.sweep())

    async def stop(self) -> None:
        """Stop the work in progress; the next gateway restarts it."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._futures.close()
        self._store.close()

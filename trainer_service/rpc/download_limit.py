"""The limit on how many checkpoints and versions a tenant downloads, or uploads, at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from paceline.rpc.identity import current_identity
from paceline.rpc.interceptors import AroundInterceptor, Call

_DOWNLOADS = frozenset(
    {
        "/paceline.trainer.v1.TrainerService/DownloadCheckpoint",
        "/paceline.trainer.v1.TrainerService/UploadCheckpoint",
        "/paceline.weights.v1.WeightService/FetchVersion",
    }
)


class DownloadLimit(AroundInterceptor):
    """Lets each tenant have so many downloads and uploads at a time; its further ones wait in order of arrival.

    A download holds open files here and unread bytes in the gateway for as long as its reader takes. Services, which
    read without pauses, are not limited.
    """

    def __init__(self, most: int) -> None:
        """Admit `most` downloads of a tenant at a time."""
        self._most = most
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant; kept by the calls that hold or await a place."""

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        if call.method not in _DOWNLOADS or (identity := current_identity()).is_peer:
            yield
            return
        places = self._places.setdefault(identity.tenant, asyncio.Semaphore(self._most))
        async with places:
            yield

"""How many checkpoints and versions a tenant downloads at the same time."""

from __future__ import annotations

import asyncio

import pytest

from paceline.rpc.identity import PEER_TENANT, Identity, set_identity
from paceline.rpc.interceptors import Call
from trainer_service.rpc.download_limit import DownloadLimit

CHECKPOINT = "/paceline.trainer.v1.TrainerService/DownloadCheckpoint"
VERSION = "/paceline.weights.v1.WeightService/FetchVersion"


class Callers:
    """Calls that last until they are cancelled, in order of their arrival."""

    def __init__(self, limit: DownloadLimit) -> None:
        self._limit = limit
        self.admitted: list[int] = []
        self.calls: list[asyncio.Task[None]] = []

    async def call(self, tenant: str, method: str) -> None:
        self.calls.append(asyncio.create_task(self._call(len(self.calls), tenant, method)))
        await settled()

    async def leave(self, number: int) -> None:
        self.calls[number].cancel()
        await settled()

    async def _call(self, number: int, tenant: str, method: str) -> None:
        set_identity(Identity(tenant))
        async with self._limit.around(Call(method, None, {})):
            self.admitted.append(number)
            await asyncio.Event().wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenants_downloads_beyond_the_limit_wait_in_order_and_nobody_elses_do():
    callers = Callers(DownloadLimit(2))
    for method in (CHECKPOINT, VERSION, CHECKPOINT, VERSION):
        await callers.call("team-a", method)
    await callers.call("team-b", CHECKPOINT)
    assert callers.admitted == [0, 1, 4]
    await callers.leave(2)  # while it waits
    await callers.leave(0)
    assert callers.admitted == [0, 1, 4, 3]


@pytest.mark.parametrize(
    ("tenant", "method"),
    [(PEER_TENANT, VERSION), ("team-a", "/paceline.trainer.v1.TrainerService/GetRun")],
    ids=["a service", "another method"],
)
async def test_services_and_other_methods_are_not_limited(tenant, method):
    callers = Callers(DownloadLimit(1))
    await callers.call("team-a", CHECKPOINT)
    for _ in range(3):
        await callers.call(tenant, method)
    assert callers.admitted == [0, 1, 2, 3]

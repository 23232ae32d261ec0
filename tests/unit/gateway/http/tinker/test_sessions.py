"""When the work of a session ends whose client is gone."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.tinker import sessions as sessions_module
from gateway.http.tinker.futures import Futures, Kind
from gateway.http.tinker.sessions import Sessions
from gateway.http.tinker.store import Store
from paceline.waiting_bytes import WaitingBytes


@pytest.mark.parametrize("is_finished", [True, False])
async def test_work_of_an_earlier_gateway_ends_with_its_session(tmp_path, monkeypatch, is_finished):
    async def never(tenant, request):
        await asyncio.Event().wait()

    store, kind = Store(tmp_path / "tinker.sqlite"), Kind("optim_step", str.encode, bytes.decode, never)
    earlier = Futures(store, WaitingBytes())
    session_id = await Sessions(store, earlier).open("tenant", {}, None)
    await earlier.post(earlier.add(kind), "model:1", "tenant", session_id, "step")
    await earlier.close()
    if is_finished:
        await store.write("UPDATE sessions SET finished = 1 WHERE session_id = ?", session_id)

    waiting = WaitingBytes()
    futures = Futures(store, waiting)
    futures.add(kind)
    sessions = Sessions(store, futures)
    await futures.resume()
    await sessions.resume()
    assert bool(waiting.used("tenant")) is not is_finished
    monkeypatch.setattr(sessions_module, "_SILENT_SECONDS", -1.0)
    await sessions._sweep()
    assert not waiting.used("tenant")
    await futures.close()
    store.close()


async def test_a_heartbeat_during_the_sweep_keeps_the_work_of_its_session(tmp_path, monkeypatch):
    store, waiting = Store(tmp_path / "tinker.sqlite"), WaitingBytes()
    futures = Futures(store, waiting)
    sessions, write = Sessions(store, futures), store.write
    session_id = await sessions.open("tenant", {}, None)

    async def never(tenant, request):
        await asyncio.Event().wait()

    kind = futures.add(Kind("optim_step", str.encode, bytes.decode, never))
    await futures.post(kind, "model:1", "tenant", session_id, "step")

    async def write_while_it_beats(*arguments):
        await write(*arguments)
        sessions.check("tenant", session_id)

    monkeypatch.setattr(store, "write", write_while_it_beats)
    sessions._seen[session_id] = 0.0
    await sessions._sweep()
    assert futures.sessions() == {session_id}
    await futures.close()
    store.close()

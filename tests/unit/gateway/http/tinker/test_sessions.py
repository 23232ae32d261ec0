"""When a session is over: finished, or silent for a while, whatever the clock and the gateway do meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from support.clocks import FakeMachine

from gateway.http.tinker import store as store_module
from gateway.http.tinker.futures import Futures, Kind
from gateway.http.tinker.sessions import SILENT_SECONDS, SessionOver, Sessions, SessionState
from gateway.http.tinker.store import Sampler, Store
from paceline import errors
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.steady_clock import SteadyClock


class Gateway:
    """What a gateway knows of sessions and of their work, which never ends by itself."""

    def __init__(self, folder, machine):
        clock = SteadyClock(machine.machine())
        clock.resume(folder / "clock.json", counts_downtime=False)
        self.store, self.waiting = Store(folder / "tinker.sqlite"), WaitingBytes()
        self.futures = Futures(self.store, self.waiting, clock)
        self.kind = self.futures.add(Kind("optim_step", str.encode, bytes.decode, self._never))
        self.sessions = Sessions(self.store, self.futures, clock)

    async def open(self, **what):
        return await self.sessions.open("tenant", what.get("tags", ()), what.get("metadata"), what.get("name"))

    async def post(self, session_id):
        await self.futures.post(self.kind, f"{session_id}:train:0:1", "tenant", session_id, "step")

    def state(self, session_id):
        return self.sessions.state(self.sessions.get("tenant", session_id))

    async def _never(self, tenant, request):
        await asyncio.Event().wait()


@pytest.fixture
def machine():
    return FakeMachine()


@pytest.fixture
def started(tmp_path, machine):
    @asynccontextmanager
    async def start():
        gateway = Gateway(tmp_path, machine)
        await gateway.futures.resume()
        await gateway.sessions.resume()
        try:
            yield gateway
        finally:
            await gateway.futures.close()
            gateway.store.close()

    return start


@pytest.mark.parametrize("step", [1_000, -1_000])
async def test_a_jump_of_the_clock_ends_no_session_and_keeps_none_open(started, machine, step):
    async with started() as gateway:
        session_id = await gateway.open()
        await gateway.post(session_id)
        machine.wall += step
        machine.pass_time(SILENT_SECONDS - 1)
        await gateway.sessions.end_silent()
        assert gateway.state(session_id) is SessionState.OPEN
        assert gateway.futures.sessions() == {session_id}
        machine.pass_time(2)
        await gateway.sessions.end_silent()
        assert gateway.state(session_id) is SessionState.OVER
        assert not gateway.waiting.used("tenant")


async def test_a_restart_neither_ends_a_session_nor_revives_one(started, machine):
    async with started() as gateway:
        silent, beating = await gateway.open(), await gateway.open()
        for session_id in (silent, beating):
            await gateway.post(session_id)
        machine.pass_time(SILENT_SECONDS - 10)
        gateway.sessions.check("tenant", beating)
        await gateway.sessions.end_silent()
    machine.pass_time(10 * SILENT_SECONDS)  # nobody can be heard while the gateway is away
    async with started() as gateway:
        await gateway.sessions.end_silent()
        assert gateway.futures.sessions() == {silent, beating}
        machine.pass_time(11)
        await gateway.sessions.end_silent()
        assert gateway.futures.sessions() == {beating}
    async with started() as gateway:
        assert gateway.state(silent) is SessionState.OVER
        with pytest.raises(SessionOver):
            gateway.sessions.check("tenant", silent)
        gateway.sessions.check("tenant", beating)


async def test_work_of_an_earlier_gateway_ends_if_its_session_was_finished(started):
    async with started() as gateway:
        session_id = await gateway.open()
        await gateway.post(session_id)
        await gateway.store.end_session(session_id, 0.0)
    async with started() as gateway:
        assert not gateway.waiting.used("tenant")


async def test_a_heartbeat_during_the_sweep_keeps_the_work_of_its_session(started, machine, monkeypatch):
    async with started() as gateway:
        session_id, heard = await gateway.open(), gateway.store.heard
        await gateway.post(session_id)

        async def heard_while_it_beats(*arguments):
            await heard(*arguments)
            gateway.sessions.check("tenant", session_id)

        monkeypatch.setattr(gateway.store, "heard", heard_while_it_beats)
        machine.pass_time(SILENT_SECONDS + 1)
        await gateway.sessions.end_silent()
        assert gateway.futures.sessions() == {session_id}


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ({"metadata": {"text": "x" * 1024}}, "user_metadata"),
        ({"metadata": {"nested": {"list": ["x"] * 1024}}}, "user_metadata"),
        ({"metadata": {str(number): "" for number in range(65)}}, "user_metadata"),
        ({"tags": ["x"] * 65}, "tags"),
        ({"tags": ["x" * 257]}, "tags"),
        ({"name": "x" * 257}, "display_name"),
    ],
)
async def test_what_describes_a_session_is_bounded(started, what, field):
    async with started() as gateway:
        with pytest.raises(errors.OutOfRange) as refused:
            await gateway.open(**what)
        assert refused.value.field == field
        assert gateway.store.session_ids("tenant", 10, 0) == []


async def test_a_tenant_has_so_many_sessions_and_the_oldest_that_are_over_are_forgotten(started, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_SESSIONS", 3)
    async with started() as gateway:
        first, second, third = [await gateway.open() for _ in range(3)]
        with pytest.raises(errors.QuotaExceeded):
            await gateway.open()
        await gateway.sessions.open("another", (), None, None)
        await gateway.sessions.finish("tenant", second)
        await gateway.store.add_sampler(Sampler("s", "tenant", second, "base"))
        fourth = await gateway.open()
        assert gateway.store.session_ids("tenant", 10, 0) == [fourth, third, first]
        assert gateway.store.session_ids("tenant", 1, 1) == [third]
        assert gateway.store.sampler("s") is None


async def test_a_session_has_so_many_samplers_and_those_of_old_versions_are_forgotten(started, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_SAMPLERS", 2)
    async with started() as gateway:
        base, old = Sampler("s:0", "tenant", "s", "base"), Sampler("s:1", "tenant", "s", "base", "run-1", 1)
        for sampler in (base, old):
            await gateway.store.add_sampler(sampler)
        await gateway.store.add_sampler(Sampler("s:2", "tenant", "s", "base"))
        assert gateway.store.samplers("s") == ["s:0", "s:2"]
        with pytest.raises(errors.QuotaExceeded):
            await gateway.store.add_sampler(Sampler("s:3", "tenant", "s", "base"))


async def test_the_oldest_results_of_a_tenant_that_has_too_many_bytes_of_them_are_deleted(started):
    async with started() as gateway:
        for number in range(3):
            for tenant in ("tenant", "another"):
                request_id = f"{tenant}:{number}"
                await gateway.futures.post(gateway.kind, request_id, tenant, "s", "step")
                size = 10_000 if tenant == "tenant" else 10
                await gateway.store.settle_future(request_id, "text", bytes(size), float(number))
        await gateway.store.trim_results(25_000)
        left = {f"{tenant}:{number}" for tenant in ("tenant", "another") for number in range(3)}
        assert {one for one in left if gateway.store.future(one)} == left - {"tenant:0"}

"""What Tinker's clients are told about finished work."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from threading import Event

import pytest
from support.patience import PATIENCE

from gateway.http.state import StateUnusable
from gateway.http.tinker import futures as futures_module
from gateway.http.tinker.futures import Futures, Kind, Result
from gateway.http.tinker.store import Store
from paceline.requests.waiting_bytes import WaitingBytes

SAMPLER = "session:sample:0"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "tinker.sqlite")
    yield store
    store.close()


@pytest.fixture
async def futures(store):
    futures = Futures(store, WaitingBytes())
    yield futures
    await futures.close()


async def test_a_first_poll_tells_of_results_that_are_not_stored_yet(store, futures):
    first, second, may_end, disk_is_ready = f"{SAMPLER}:1", f"{SAMPLER}:2", asyncio.Event(), Event()

    async def sample(tenant, posted):
        if posted.request == second:
            await may_end.wait()
        return Result.of({"text": posted.request})

    kind = Kind("sample", str.encode, bytes.decode, sample)
    futures.add(kind)
    for request_id in (first, second):
        await futures.post(kind, request_id, "tenant", "session", request_id)
    await futures.result("tenant", first, PATIENCE)
    await store.do(lambda _: None)  # the first result is in the file
    waiting = asyncio.create_task(store.do(lambda _: disk_is_ready.wait()))
    try:
        may_end.set()
        await futures.result("tenant", second, PATIENCE)
        told, cursor = await futures.completions("tenant", SAMPLER, 0, 0, 0.0)
        assert [request_id for request_id, _ in told] == [first, second]
        assert await futures.completions("tenant", SAMPLER, 0, cursor, 0.0) == ([], cursor)
    finally:
        disk_is_ready.set()
        await waiting


async def test_work_that_cannot_be_stored_is_refused_each_time_and_counts_no_bytes(store, monkeypatch):
    waiting, disk_is_full = WaitingBytes(), asyncio.Event()
    futures = Futures(store, waiting)

    async def never(tenant, request):
        await asyncio.Event().wait()

    async def full(_):
        await disk_is_full.wait()
        raise StateUnusable("full")

    kind = futures.add(Kind("optim_step", str.encode, bytes.decode, never))
    with monkeypatch.context() as patch:
        patch.setattr(store, "add_future", full)
        posts = [asyncio.create_task(futures.post(kind, "model:1", "tenant", "session", "step")) for _ in range(2)]
        await asyncio.sleep(0)
        assert waiting.used("tenant")
        disk_is_full.set()
        assert [type(error) for error in await asyncio.gather(*posts, return_exceptions=True)] == [StateUnusable] * 2
    assert not waiting.used("tenant")
    await futures.post(kind, "model:1", "tenant", "session", "step")
    assert store.future("model:1").request == b"step"
    await futures.close()


LARGE = Result.of({"text": "x" * (1 << 20)})


async def limit_pages(store, pages):
    """Let the database grow to so many pages: with 100, every write of LARGE finds the disk full."""
    is_set = False
    while not is_set:
        with suppress(StateUnusable):  # of another write in the same transaction
            await store.do(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchall())
            is_set = True


async def post_with_large_result(futures):
    """Post work whose result is LARGE; return its id when the work is stored and the result has been delivered."""
    request_id, is_posted = f"{SAMPLER}:1", asyncio.Event()

    async def sample(tenant, request):
        await is_posted.wait()
        return LARGE

    kind = futures.add(Kind("sample", str.encode, bytes.decode, sample))
    await futures.post(kind, request_id, "tenant", "session", "prompt")
    is_posted.set()
    assert await futures.result("tenant", request_id, PATIENCE) == LARGE
    return request_id


async def test_a_result_that_cannot_be_stored_is_kept_and_stored_once_the_disk_has_space(store, futures, monkeypatch):
    monkeypatch.setattr(futures_module, "KEPT_IN_MEMORY_SECONDS", 0.0)
    monkeypatch.setattr(futures_module, "MAX_DELAY", 0.01)
    await limit_pages(store, 100)
    request_id = await post_with_large_result(futures)
    with suppress(StateUnusable):
        await store.do(lambda _: None)  # storing it has failed, also if this is in the same transaction
    assert store.future(request_id).result is None
    assert await futures.result("tenant", request_id, PATIENCE) == LARGE
    await limit_pages(store, 1 << 20)
    async with asyncio.timeout(PATIENCE):
        while store.future(request_id).result is None:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    assert store.future(request_id).result == LARGE.body
    assert await futures.result("tenant", request_id, PATIENCE) == LARGE


async def test_a_full_disk_does_not_keep_the_gateway_from_ending(store, futures):
    await limit_pages(store, 100)
    request_id = await post_with_large_result(futures)
    async with asyncio.timeout(PATIENCE):
        await futures.close()
    assert [work.request_id for work in store.unfinished()] == [request_id]


async def test_work_that_ended_before_it_could_not_be_stored_takes_away_none_that_is_posted_again(store, monkeypatch):
    monkeypatch.setattr(futures_module, "KEPT_IN_MEMORY_SECONDS", 0.2)
    futures, disk_is_full, goes_on = Futures(store, WaitingBytes()), asyncio.Event(), asyncio.Event()
    goes_on.set()

    async def run(tenant, request):
        await goes_on.wait()
        return Result.of({})

    async def full(_):
        await disk_is_full.wait()
        raise StateUnusable("full")

    kind = futures.add(Kind("optim_step", str.encode, bytes.decode, run))
    with monkeypatch.context() as patch:
        patch.setattr(store, "add_future", full)
        posting = asyncio.create_task(futures.post(kind, "model:1", "tenant", "session", "step"))
        async with asyncio.timeout(PATIENCE):
            while futures.sessions():  # noqa: ASYNC110 - no event tells when its work has ended
                await asyncio.sleep(0)
        disk_is_full.set()
        with pytest.raises(StateUnusable):
            await posting
    goes_on.clear()
    await futures.post(kind, "model:1", "tenant", "session", "step")
    # Timers end in the order of their deadlines, and that of the first work, which forgets it, was set before this one.
    await asyncio.sleep(futures_module.KEPT_IN_MEMORY_SECONDS)
    assert not isinstance(await futures.result("tenant", "model:1", 0.0), Result)
    goes_on.set()
    await futures.close()

"""Answers over HTTP whose caller's key is removed while they are in progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import APIRouter
from support.patience import PATIENCE

from gateway.http import apis, edge
from gateway.http.middleware import AccessMiddleware
from gateway.http.streaming import EVENTS, StreamedResponse
from gateway.keys import KeyRing
from gateway.settings import GatewaySettings
from paceline.files.key_changes import add_key, remove_key
from paceline.requests.waiting_bytes import WaitingBytes

FIRST = b"data: first\n\n"


class Api:
    """An API of answers that begin and never end, and of one that begins when it may."""

    def __init__(self):
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.freed = 0
        self.routes = APIRouter()
        self.routes.add_api_route("/events", lambda: StreamedResponse(self.endless(), media_type=EVENTS))
        self.routes.add_api_route("/file", lambda: StreamedResponse(self.endless(), headers={"Content-Length": "99"}))
        self.routes.add_api_route("/late", self.late)

    async def endless(self):
        try:
            yield FIRST
            await asyncio.Event().wait()
        finally:
            self.freed += 1

    async def late(self):
        self.is_asked.set()
        await self.may_answer.wait()
        return "done"


@pytest.fixture
def api():
    return Api()


@pytest.fixture
def keys_file(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture
async def client_of(api, keys_file) -> AsyncIterator:
    """Serve the API; a function makes a client with a new key."""
    key = {name: add_key(keys_file, "team", name) for name in ("laptop", "other")}
    app = AccessMiddleware(apis.make_app(api.routes), [KeyRing(keys_file)], WaitingBytes(), 100, [])
    config = edge.server_config(GatewaySettings(insecure=True), app)
    listening, server = edge.bind("127.0.0.1:0"), edge.EdgeServer(config, 10)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    host, port = listening.getsockname()
    yield lambda name: httpx.AsyncClient(
        base_url=f"http://{host}:{port}", headers={"X-API-Key": key[name]}, timeout=PATIENCE
    )
    server.should_exit = True
    await serving


@asynccontextmanager
async def begun(client, path):
    """Yield what follows the first part of an answer."""
    async with client.stream("GET", path) as answer:
        parts = answer.aiter_raw()
        assert await anext(parts) == FIRST
        yield parts


async def test_a_stream_of_events_ends_with_the_reason_and_frees_what_it_has(api, client_of, keys_file):
    async with client_of("laptop") as client, begun(client, "/events") as events:
        remove_key(keys_file, "laptop")
        (last,) = [part async for part in events]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "INVALID_API_KEY"
        assert api.freed == 1


async def test_another_answer_is_cut_off(api, client_of, keys_file):
    async with client_of("laptop") as client, begun(client, "/file") as rest:
        remove_key(keys_file, "laptop")
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(rest)
        assert api.freed == 1


async def test_answers_of_other_keys_and_those_that_have_not_begun_go_on(api, client_of, keys_file):
    async with client_of("laptop") as client, client_of("other") as other, begun(other, "/events"):
        asking = asyncio.create_task(client.get("/late"))
        await api.is_asked.wait()
        async with begun(client, "/events") as events:
            remove_key(keys_file, "laptop")
            assert [part async for part in events]
        api.may_answer.set()
        assert (await asking).json() == "done"
        assert api.freed == 1

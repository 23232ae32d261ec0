"""Streamed answers whose caller leaves."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.http.streaming import StreamedResponse


@pytest.mark.parametrize("sent_before", [0, 1])
async def test_a_stream_whose_caller_leaves_frees_what_it_held_before_the_response_has_ended(sent_before):
    left, stuck, freed = asyncio.Event(), asyncio.Event(), []

    async def events():
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            freed.append("generator")

    async def receive():
        await stuck.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if (message["type"] == "http.response.body") == bool(sent_before):
            stuck.set()
            await left.wait()

    resources = AsyncExitStack()
    resources.callback(freed.append, "resources")
    response = StreamedResponse(events(), resources)
    await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert freed == ["generator", "resources"] if sent_before else ["resources"]

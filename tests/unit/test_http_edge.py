"""The HTTP port by itself: heads that do not come, and what a gateway without FastAPI says."""

from __future__ import annotations

import asyncio

import uvicorn

from gateway.http import edge


async def _answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_a_connection_without_a_head_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(edge, "_HEAD_SECONDS", 0.2)
    listening = edge._bind("127.0.0.1:0")
    config = uvicorn.Config(_answer, http=edge.TimedProtocol, log_config=None, lifespan="off")
    server = edge._Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    try:
        for head, answer in ((b"", b""), (b"GET / HTTP/1.1\r\n", b""), (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"ok")):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(head)
            if answer:  # a second head that does not come ends it too
                assert (await reader.readuntil(b"ok")).endswith(answer)
                writer.write(b"GET")
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
    finally:
        server.should_exit = True
        await serving

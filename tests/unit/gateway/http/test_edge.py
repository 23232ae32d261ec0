"""The HTTP port by itself: peers that send too much or read nothing, file addresses, and a gateway without FastAPI."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Annotated

import grpc
import httpx
import pytest
import uvicorn
import uvloop
from fastapi import APIRouter, Body
from pydantic import ValidationError
from starlette.requests import Request
from structlog.testing import capture_logs
from support.certificates import make_pem
from support.patience import PATIENCE

from gateway.http import apis, edge, listener
from gateway.http.middleware import AccessMiddleware
from gateway.http.tinker.downloads import Downloads
from gateway.settings import GatewaySettings
from paceline import errors
from paceline.layout import CheckpointPath
from paceline.requests.bodies import MAX_JSON_PARTS
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import Identity


async def _answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def _config(app):
    return edge.server_config(GatewaySettings(insecure=True), app)


@asynccontextmanager
async def _serve(config, max_connections=math.inf):
    """Yield the address of a running server."""
    listening, server = edge.bind("127.0.0.1:0"), edge.EdgeServer(config, max_connections)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        await serving


def _trust(pem):
    return ssl.create_default_context(cafile=pem.cert)


async def test_a_connection_without_a_head_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(edge, "HEAD_SECONDS", 0.2)
    config = uvicorn.Config(_answer, http=edge.TimedProtocol, log_config=None, lifespan="off")
    async with _serve(config) as address:
        for head, answer in ((b"", b""), (b"GET / HTTP/1.1\r\n", b""), (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"ok")):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(head)
            if answer:  # a second head that never arrives ends it too
                assert (await reader.readuntil(b"ok")).endswith(answer)
                writer.write(b"GET")
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()


async def test_grpc_clients_at_the_http_port_are_one_warning_that_names_theirs():
    settings = GatewaySettings(listen="127.0.0.1:50050", insecure=True)
    with capture_logs() as logged:
        async with _serve(edge.server_config(settings, _answer)) as address:
            async with grpc.aio.insecure_channel("{}:{}".format(*address)) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary("/x.X/Y")(b"")
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
    (warning,) = logged
    assert (warning["log_level"], warning["peer"]) == ("warning", "127.0.0.1")
    assert warning["remedy"].endswith("127.0.0.1:50050")


async def test_the_access_log_has_the_status_as_a_number():
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ignore(message):
        pass

    app = AccessMiddleware(answer, [], WaitingBytes(), 100, ["/health"])
    with capture_logs() as logged:
        await app({"type": "http", "method": "GET", "path": "/health", "headers": []}, ignore, ignore)
    assert repr(logged[0]["status"]) == "200"


@pytest.mark.parametrize(("zeros", "status"), [(18, 401), (5000, 400), (60_000, 400)])
async def test_a_length_with_many_digits_is_the_callers_error(zeros, status):
    app = AccessMiddleware(_answer, [], WaitingBytes(), 100, [])
    async with (
        _serve(_config(app)) as (host, port),
        asyncio.timeout(PATIENCE),
    ):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"0" * zeros + b"5\r\n\r\nhello")
        assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()


async def test_json_of_too_many_parts_is_refused_before_all_of_it_has_arrived():
    async def read(scope, receive, send):
        await Request(scope, receive).body()
        await _answer(scope, receive, send)

    most = {"/": MAX_JSON_PARTS}
    app = AccessMiddleware(read, [_ByName()], WaitingBytes(), 32 << 20, [], most_parts=most.get)
    head = "POST /{} HTTP/1.1\r\nHost: x\r\nX-API-Key: a\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
    bodies = {"": b"[" + b"{}," * (1 << 20), "binary": b"{}," * (1 << 20)}
    async with (
        _serve(_config(app)) as (host, port),
        asyncio.timeout(PATIENCE),
    ):
        for path, status in (("", 400), ("binary", 200)):
            reader, writer = await asyncio.open_connection(host, port)
            missing = 1 if status == 400 else 0
            writer.write(head.format(path, len(bodies[path]) + missing).encode() + bodies[path])
            assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
            writer.close()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'"' + b"x" * 20 + b'"', 429, "QUOTA_EXCEEDED"),
        (b'"' + b"x" * 1000 + b'"', 413, "MESSAGE_TOO_LARGE"),
        (b"[" + b"{}," * MAX_JSON_PARTS + b"{}]", 400, "OUT_OF_RANGE"),
        (b'"\xff"', 400, "UNREADABLE_MESSAGE"),
    ],
)
async def test_a_refused_body_of_a_route_with_fields_keeps_its_reason(body, status, reason):
    async def parts():  # in pieces, so that no length is told beforehand
        yield body

    routes = APIRouter()

    @routes.post("/")
    async def take(content: Annotated[str, Body()]) -> str:
        return content

    is_large = reason == "MESSAGE_TOO_LARGE"
    waiting = WaitingBytes(tenant_limit=10 if status == 429 else 0)
    guarded = AccessMiddleware(apis.make_app(routes), [_ByName()], waiting, 100 if is_large else 32 << 20, [])
    transport = httpx.ASGITransport(guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        headers = {"X-API-Key": "a", "Content-Type": "application/json"}
        answer = await client.post("/", content=parts(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, reason)
    assert ("retry-after" in answer.headers) == (status == 429)


class _ByName:
    """Takes a token for the name of its holder's tenant."""

    def identify(self, token):
        return Identity(token) if token else None


async def test_a_tenant_with_its_share_of_requests_is_refused_more_while_others_are_served():
    entered, gate = asyncio.Semaphore(0), asyncio.Event()

    async def wait(scope, receive, send):
        entered.release()
        await gate.wait()
        await _answer(scope, receive, send)

    async def get(address, tenant):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nX-API-Key: {tenant}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer

    app = AccessMiddleware(wait, [_ByName()], WaitingBytes(), 100, [], max_requests_per_tenant=2)
    async with _serve(_config(app)) as address, asyncio.timeout(PATIENCE):
        waiting = [asyncio.create_task(get(address, tenant)) for tenant in ("greedy", "greedy", "other")]
        for _ in waiting:
            await entered.acquire()
        head, _, body = (await get(address, "greedy")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "OVERLOADED"
        gate.set()
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in await asyncio.gather(*waiting))
        assert (await get(address, "greedy")).startswith(b"HTTP/1.1 200 ")


async def test_a_request_whose_path_is_its_credential_counts_as_its_tenants():
    tenants = []

    async def note(scope, receive, send):
        tenants.append(scope["state"]["identity"].tenant)
        await _answer(scope, receive, send)

    def identify(path):
        if path.endswith("bad"):
            raise errors.MethodNotAllowed("no")
        return Identity(path.rpartition("/")[2])

    app = AccessMiddleware(note, [_ByName()], WaitingBytes(), 100, [], 0, signed={"/files/": identify})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={"X-API-Key": "another"}) as client:
        assert (await client.get("/files/greedy")).status_code == 429
        assert (await client.get("/files/bad")).status_code == 403
    assert tenants == []


async def test_a_body_that_begins_as_http2_does_is_a_body():
    async def read(scope, receive, send):
        assert (await receive())["body"] == b"PRI * HTTP/2.0"
        await _answer(scope, receive, send)

    async with _serve(_config(read)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"PRI * HTTP/2.0")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()


async def _echo_length(scope, receive, send):
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d bytes" % size})


_CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("beginning", [b"GET / HTTP/1.1\r\nX: ", b"GET /", _CHUNKED + b"0\r\nX: ", _CHUNKED + b"5;"])
async def test_a_head_without_an_end_is_not_kept(beginning):
    async with (
        _serve(_config(_echo_length)) as (host, port),
        asyncio.timeout(20),
    ):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(beginning)
        with suppress(OSError):
            for _ in range(64):
                writer.write(b"x" * (1 << 20))
                await writer.drain()
            pytest.fail("64 MiB of a head were taken")
        with suppress(OSError):
            assert b" 200 " not in await reader.read()
        writer.close()


async def test_a_long_head_and_a_long_body_are_served():
    head = b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 60_000 + b"\r\nContent-Length: 8000000\r\n\r\n"
    chunk = b"8\r\neight by\r\n" * 50_000
    async with (
        _serve(_config(_echo_length)) as (host, port),
        asyncio.timeout(20),
    ):
        for request, size in ((head + bytes(8_000_000), 8_000_000), (_CHUNKED + chunk + b"0\r\n\r\n", 400_000)):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            await reader.readuntil(b"%d bytes" % size)
            writer.close()


_GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_a_few_requests_may_wait_for_the_answer_before_theirs_and_no_more():
    entered, gate = [], asyncio.Event()

    async def wait(scope, receive, send):
        entered.append(scope["path"])
        await gate.wait()
        await _answer(scope, receive, send)

    async with (
        _serve(_config(wait)) as (host, port),
        asyncio.timeout(PATIENCE),
    ):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(_GET * 8000)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert len(entered) == 1
        gate.set()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(_GET * (1 + edge.MAX_PIPELINED))
        for _ in range(1 + edge.MAX_PIPELINED):
            await reader.readuntil(b"ok")
        writer.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_above_the_limit_are_closed_on_arrival_and_others_served(run):
    async def main():
        config = _config(_answer)
        async with _serve(config, max_connections=2) as (host, port), asyncio.timeout(PATIENCE):
            kept = [await asyncio.open_connection(host, port) for _ in range(2)]
            with capture_logs() as logged:
                for _ in range(2):
                    reader, writer = await asyncio.open_connection(host, port)
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
                    writer.close()
            assert [(entry["event"], entry["peer"]) for entry in logged] == [("connection refused", "127.0.0.1")]
            for reader, writer in kept:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_GET)
            await reader.readuntil(b"ok")
            writer.close()

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_without_a_handshake_is_closed_in_time(run, monkeypatch):
    async def main():
        config = _config(_answer)
        config.load()
        config.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        async with _serve(config) as (host, port), asyncio.timeout(30):  # asyncio's own limit is 60
            reader, writer = await asyncio.open_connection(host, port)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.2)
    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_without_a_handshake_count_until_they_end(run, monkeypatch, tmp_path):
    pem = make_pem(tmp_path, "server")

    async def main():
        settings = GatewaySettings(insecure=True, tls_cert=pem.cert, tls_key=pem.key)
        server = _serve(edge.server_config(settings, _answer), max_connections=2)
        async with server as (host, port), asyncio.timeout(PATIENCE):
            waiting = [await asyncio.open_connection(host, port) for _ in range(2)]
            reader, writer = await asyncio.open_connection(host, port)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            for _, other in waiting:
                other.close()
            writer.close()
            while True:  # the places are free once the server knows of it
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, port, ssl=_trust(pem))
                    break
            writer.write(_GET)
            await reader.readuntil(b"ok")
            writer.close()

    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 2 * PATIENCE)
    run(main())


class _Full(socket.socket):
    """A listening socket for whose first connection there is no file descriptor at first."""

    is_full = True

    def accept(self):
        if self.is_full:
            self.is_full = False
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_that_cannot_be_accepted_yet_is_accepted_later(run, monkeypatch):
    async def main():
        config = uvicorn.Config(_answer, http=edge.TimedProtocol, log_config=None, lifespan="off")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = edge.EdgeServer(config)
            serving = asyncio.create_task(server.serve(sockets=[_Full(fileno=os.dup(listening.fileno()))]))
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                writer.write(_GET)
                await reader.readuntil(b"ok")
            writer.close()
            server.should_exit = True
            await serving

    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.01)
    run(main())


def _answers_at_length(left, parts=2):
    """Return an application whose answer no kernel holds, and which sets `left` when it has answered."""

    async def answer(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"50000000")]})
            for part in range(1, parts + 1):
                await send(
                    {"type": "http.response.body", "body": bytes(50_000_000 // parts), "more_body": part < parts}
                )
        finally:
            left.set()

    return answer


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_peer_that_takes_nothing_is_cut_off(run):
    async def main():
        left = asyncio.Event()
        config = edge.server_config(GatewaySettings(insecure=True, reader_seconds=0.2), _answers_at_length(left))
        async with _serve(config) as (host, port), asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_GET)
            await reader.readuntil(b"\r\n\r\n")
            await left.wait()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(50_000_000)
            writer.close()

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_peer_that_takes_nothing_is_cut_off_also_over_tls(run, tmp_path):
    pem = make_pem(tmp_path, "server")

    async def main():
        settings = GatewaySettings(insecure=True, reader_seconds=0.2, tls_cert=pem.cert, tls_key=pem.key)
        async with _serve(edge.server_config(settings, _answers_at_length(asyncio.Event(), parts=1))) as (host, port):
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection(host, port, ssl=_trust(pem))
                with capture_logs() as logged:
                    writer.write(_GET)
                    while not any("cut off" in entry["event"] for entry in logged):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(50_000_000)
                writer.close()

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_that_reads_slowly_is_answered_whole(run, tls, monkeypatch, tmp_path):
    pem = make_pem(tmp_path, "server")
    connections = []

    def look_when_told(protocol):
        protocol._looking = asyncio.get_running_loop().create_future()  # cancelled when the connection ends
        connections.append(protocol)

    async def look_again():
        """Let the server look at the connection once its peer took something; return whether there was more to take."""
        protocol, unread = connections[0], 0
        while not protocol._looking.cancelled():
            unread, acknowledged = edge._sent(protocol.transport)
            if not unread or acknowledged != protocol._acknowledged:
                break
            await asyncio.sleep(0.001)
        if unread:
            protocol._look()
        return unread > 0

    async def main():
        files = {"tls_cert": pem.cert, "tls_key": pem.key} if tls else {}
        config = edge.server_config(GatewaySettings(insecure=True, **files), _answers_at_length(asyncio.Event()))
        config.timeout_keep_alive = 0
        async with _serve(config) as (host, port), asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port, ssl=_trust(pem) if tls else None)
            writer.write(_GET)
            await reader.readuntil(b"\r\n\r\n")
            looks = 0
            for _ in range(50):
                await reader.readexactly(1_000_000)
                await asyncio.sleep(0.02)  # in all longer than the limit of a shutdown
                looks += await look_again()
            writer.close()
        assert looks > 10

    # However busy the machine is, the peer reads between two looks.
    monkeypatch.setattr(edge.TimedProtocol, "_look_later", look_when_told)
    # The loop's own limit of a shutdown, which must not apply. That of uvloop cannot be changed.
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 0.1)
    run(main())


@pytest.mark.parametrize(
    ("public_url", "start"),
    [("", "http://called:8000/"), ("https://weights.example", "https://weights.example/")],
)
def test_addresses_of_files_begin_as_clients_reach_the_port(public_url, start):
    scope = {"type": "http", "method": "GET", "scheme": "http", "path": "/", "headers": [(b"host", b"called:8000")]}
    path = CheckpointPath.parse(f"paceline://run-{'0' * 32}/sampler/one")
    address, _ = Downloads(None, b"secret", public_url).address(
        Request(scope), Identity("tenant"), path, "a.safetensors"
    )
    assert address.startswith(start)
    assert "//" not in address.removeprefix(start)


@pytest.mark.parametrize("public_url", ["weights.example", "ftp://weights.example", "https://"])
def test_a_public_address_that_is_none_is_refused(public_url):
    with pytest.raises(ValidationError, match="http_public_url"):
        GatewaySettings(http_public_url=public_url)


@pytest.mark.parametrize("waiting", [0, 1, 3])
async def test_a_request_ends_with_its_caller_however_many_wait_behind_it(waiting):
    begun, left = asyncio.Event(), asyncio.Event()

    async def wait(scope, receive, send):
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with _serve(_config(wait)) as address, asyncio.timeout(PATIENCE):
        _, writer = await asyncio.open_connection(*address)
        writer.write(_GET * (1 + waiting))
        await begun.wait()
        writer.close()
        await left.wait()


PAGE = "https://app.example:8443"


class _Keys:
    def identify(self, token):
        return Identity("team") if token == "key" else None


def _pages(*origins):
    """Return a client of an application that needs a key and that pages of these origins may call."""
    guarded = AccessMiddleware(_answer, [_Keys()], WaitingBytes(math.inf), 1 << 20, ())
    app = edge.with_origins(guarded, GatewaySettings(insecure=True, http_origins=",".join(origins)).http_origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def _preflight(origin):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return {"Origin": origin} | asked


async def test_pages_of_the_set_origins_may_call_and_need_a_key_only_for_the_call_itself():
    async with _pages(PAGE) as client:
        asked = await client.options("/v1/chat/completions", headers=_preflight(PAGE))
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in asked.headers
        called = await client.post("/x", headers={"Origin": PAGE, "Authorization": "Bearer key"})
        assert (called.status_code, called.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "X-Paceline-Version" in called.headers["access-control-expose-headers"]
        refused = await client.post("/x", headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


async def test_pages_of_other_origins_are_allowed_nothing():
    async with _pages(PAGE) as client:
        asked = await client.options("/x", headers=_preflight("https://other.example"))
        assert asked.status_code == 400
        assert "access-control-allow-origin" not in asked.headers
        called = await client.post("/x", headers={"Origin": "https://other.example", "Authorization": "Bearer key"})
        assert "access-control-allow-origin" not in called.headers
    async with _pages() as client:
        asked = await client.options("/x", headers=_preflight(PAGE))
        assert asked.status_code == 401
        assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://*.example", "ftp://app.example"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ValidationError, match="is no origin"):
        GatewaySettings(insecure=True, http_origins=origin)

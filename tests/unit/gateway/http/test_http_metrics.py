"""Requests of the HTTP APIs in the gateway's metrics."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry

from gateway.http import apis
from gateway.http.http_metrics import HttpMetrics
from gateway.http.middleware import AccessMiddleware
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import Identity

ROUTE = {"api": "parrots", "route": "POST /say/{word}"}
OTHER = {"api": "other", "route": "other"}
KEY = {"authorization": "Bearer a key"}


class Keys:
    def identify(self, token):
        return Identity("team") if token == "a key" else None

    def still_admits(self, identity):
        return True


class Parrot:
    """An API that repeats what it is sent, once it may."""

    def __init__(self):
        self.may_answer, self.heard = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        routes = APIRouter(tags=["parrots"])
        routes.add_api_route("/say/{word}", self.say, methods=["POST"])
        self.registry = CollectorRegistry()
        metrics = HttpMetrics(self.registry)
        app = AccessMiddleware(apis.make_app(routes), [Keys()], WaitingBytes(), 100, [], metrics=metrics)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=KEY)

    async def say(self, word: str, request: Request):
        self.heard.set()
        await self.may_answer.wait()
        return (await request.body()).decode()

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"paceline_gateway_http_{name}", labels)


@pytest.fixture
async def parrot():
    made = Parrot()
    async with made.client:
        yield made


async def test_a_request_is_counted_by_route_and_not_by_what_the_caller_wrote(parrot):
    for word in ("hello", "goodbye"):
        answer = await parrot.client.post(f"/say/{word}", content=b"polly")
        assert answer.json() == "polly"
    assert parrot.value("handled_total", **ROUTE, code="200") == 2
    assert parrot.value("seconds_count", **ROUTE) == 2
    assert parrot.value("received_bytes_total", **ROUTE) == 2 * len("polly")
    assert parrot.value("sent_bytes_total", **ROUTE) == 2 * len('"polly"')


async def test_a_request_in_progress_is_counted_until_it_ends(parrot):
    parrot.may_answer.clear()
    asking = asyncio.create_task(parrot.client.post("/say/hello"))
    await parrot.heard.wait()
    assert parrot.value("in_flight") == 1
    parrot.may_answer.set()
    await asking
    assert parrot.value("in_flight") == 0


@pytest.mark.parametrize(
    ("method", "path", "headers", "code"),
    [
        ("GET", "/nothing", {}, "404"),
        ("GET", "/say/hello", {}, "405"),
        ("POST", "/say/hello", {"authorization": "Bearer another"}, "401"),
    ],
)
async def test_a_request_that_no_route_answers_is_counted_as_another(parrot, method, path, headers, code):
    await parrot.client.request(method, path, headers=headers)
    assert parrot.value("handled_total", **OTHER, code=code) == 1


async def test_a_body_that_is_too_large_is_counted_with_its_refusal(parrot):
    await parrot.client.post("/say/hello", content=b"x" * 101)
    assert parrot.value("handled_total", **OTHER, code="413") == 1

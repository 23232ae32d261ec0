"""Routes that take JSON: where it is decoded, and how much of what is wrong with it is looked at."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from fastapi import APIRouter
from pydantic import BaseModel, model_validator

from gateway.http.apis import make_app
from gateway.http.json_bodies import JsonRoute, Texts, without_nulls


class Body(BaseModel):
    """A body that tells where it was validated."""

    texts: Texts = []
    thread: int = 0

    @model_validator(mode="before")
    @classmethod
    def _here(cls, body):
        given = without_nulls(body)
        return given | {"thread": threading.get_ident()} if isinstance(given, dict) else given


async def post(content):
    router = APIRouter(route_class=JsonRoute)

    @router.post("/")
    async def where(body: Body) -> dict[str, int]:
        return {"texts": len(body.texts), "thread": body.thread}

    transport = httpx.ASGITransport(make_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.post("/", content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("count", "is_here"), [(10, True), (100_000, False)])
async def test_a_large_body_is_parsed_and_validated_in_a_thread(count, is_here):
    answer = (await post(json.dumps({"texts": ["a"] * count}).encode())).json()
    assert answer["texts"] == count
    assert (answer["thread"] == threading.get_ident()) is is_here


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "Field required"),
        (b"{", "the body is not JSON in UTF-8"),
        (b'{"a": "\xff"}', "the body is not JSON in UTF-8"),
        (b"[" * 100_000, "the body is not JSON in UTF-8"),
        (b"[1]", "valid dictionary"),
        (b'{"texts": [' + b"1," * 100_000 + b"1]}", "texts[0]: Input should be a valid string"),
        (json.dumps(dict.fromkeys(map(str, range(1000)), 1)).encode(), "has 1000 fields; at most 256"),
    ],
)
async def test_a_wrong_body_is_refused_for_one_reason(content, told):
    answer = await post(content)
    assert answer.status_code == 400
    assert told in answer.json()["detail"]

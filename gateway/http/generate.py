"""POST /generate as Atropos' environments expect it from a vLLM server: tokens in, tokens and logprobs out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.http.middleware import tenant_of, while_connected
from gateway.http.models import Models
from gateway.http.openai import OpenAiApi
from paceline import errors
from paceline.chat.bodies import read_object
from paceline.requests.bodies import decoded

_PREFIX = "token_id:"
"""Prefix of a token's name when ids replace texts."""


@dataclass(frozen=True, slots=True)
class GenerateApi:
    """The route, also below the name of weights, because its clients name no model."""

    models: Models
    openai: OpenAiApi

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(tags=["generate"])

        @router.post("/generate")
        async def generate(request: Request) -> Response:
            return await self._generate(request, "")

        @router.post("/weights/{weights}/generate")
        async def generate_from(request: Request, weights: str) -> Response:
            return await self._generate(request, weights)

        @router.get("/weights/{weights}/health")
        async def health(request: Request, weights: str) -> dict[str, str]:
            ref = await self.models.resolve(tenant_of(request), weights, "weights")
            if ref.run_id:
                await self.models.run(tenant_of(request), ref.run_id)
            return {"status": "ok"}

        return router

    async def _generate(self, request: Request, weights: str) -> Response:
        content = await request.body()
        asked = await decoded(len(content), _Asked.read, content, weights)
        prompt, given = asked.prompt, asked.given
        whole = self.openai.complete_whole(tenant_of(request), asked.name, asked.body)
        answer, headers = await while_connected(request, whole)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        reply: dict[str, Any] = {
            "text": [choice["text"] for choice in choices],
            "prompt": prompt if isinstance(prompt, str) else None,
            "finish_reasons": [choice["finish_reason"] for choice in choices],
            "prompt_token_ids": choices[0]["prompt_token_ids"],
            "token_ids": [choice["token_ids"] for choice in choices],
        }
        if given.get("logprobs") is not None:
            reply["logprobs"] = [_positions(choice["logprobs"]) for choice in choices]
        if given.get("prompt_logprobs") is not None:
            reply["prompt_logprobs"] = [_position(position) for position in choices[0]["prompt_logprobs"]]
        return JSONResponse(reply, headers=headers)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as OpenAI's API has it."""

    name: str
    """The weights'."""
    prompt: str | list[int] | None
    given: Mapping[str, Any]
    """The other fields."""
    body: bytes

    @classmethod
    def read(cls, content: bytes, weights: str) -> _Asked:
        """Parse a request below the name `weights`. Raises InvalidArgument, UnreadableMessage, Unsupported."""
        given = read_object(content)
        name = weights or given.get("model")
        if not isinstance(name, str) or not name:
            raise errors.MissingField("is not set; call /weights/<model>/generate", field="model")
        if given.pop("stream", False):
            raise errors.Unsupported("is not served here; /v1/completions streams", field="stream")
        prompt = given.pop("prompt", None)
        if isinstance(prompt, dict):
            for field in prompt.keys() - {"prompt_token_ids"}:
                raise errors.UnknownField("is not served; leave it out", field=f"prompt.{field[:80]}")
            prompt = prompt.get("prompt_token_ids")
        if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
            raise errors.InvalidArgument("is one prompt: text, or prompt_token_ids", field="prompt")
        more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = json.dumps({**given, **more, "model": name, "prompt": prompt}).encode()
        return cls(name, prompt, given, body)


def _position(known: Mapping[str, Mapping[str, Any]] | None) -> dict[str, float] | None:
    """Return the log-probability of a prompt's token, and those of the likeliest tokens; None for the first token."""
    return None if known is None else {token: told["logprob"] for token, told in known.items()}


def _positions(logprobs: Mapping[str, Any]) -> list[list[dict[str, float]]]:
    """Return a list of one object per sampled token: its id and log-probability first, then the most likely tokens."""
    rows = []
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    for name, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        others = {other.removeprefix(_PREFIX): known for other, known in (top or {}).items()}
        rows.append([{name.removeprefix(_PREFIX): value} | others])
    return rows

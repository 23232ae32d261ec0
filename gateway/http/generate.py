"""POST /generate as Atropos' environments expect it from a vLLM server: tokens in, tokens and logprobs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.http.middleware import tenant_of, while_connected
from gateway.http.models import Models
from gateway.http.openai import OpenAiApi
from gateway.http.services import Services
from paceline import errors
from paceline.chat import read_object
from paceline.types import SamplingParams

_SECONDS = 3600.0
_PREFIX = "token_id:"
"""Prefix of a token's name when ids replace texts."""
_MAX_TOP = 1_000_000
"""The contract's bound of `topk_prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class GenerateApi:
    """The route, also below the name of weights, because its clients name no model."""

    services: Services
    models: Models
    openai: OpenAiApi

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter()

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
        given = read_object(await request.body())
        name = weights or given.get("model")
        if not isinstance(name, str) or not name:
            raise errors.MissingField("is not set; call /weights/<model>/generate", field="model")
        if given.pop("stream", False):
            raise errors.Unsupported("is not served here; /v1/completions streams", field="stream")
        prompt, logprobs, top = given.pop("prompt", None), given.get("logprobs"), given.pop("prompt_logprobs", None)
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids")
        if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
            raise errors.InvalidArgument("is one prompt: text, or prompt_token_ids", field="prompt")
        if top is not None and (type(top) is not int or not 0 <= top <= _MAX_TOP):
            raise errors.InvalidArgument(f"must be a number of tokens, 0 to {_MAX_TOP}", field="prompt_logprobs")
        more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {**given, **more, "model": name, "prompt": prompt}
        whole = self.openai.complete_whole(tenant_of(request), name, body)
        answer, headers = await while_connected(request, whole)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        tokens = choices[0]["prompt_token_ids"]
        reply: dict[str, Any] = {
            "text": [choice["text"] for choice in choices],
            "prompt": prompt if isinstance(prompt, str) else None,
            "finish_reasons": [choice["finish_reason"] for choice in choices],
            "prompt_token_ids": tokens,
            "token_ids": [choice["token_ids"] for choice in choices],
        }
        if logprobs is not None:
            reply["logprobs"] = [_positions(choice["logprobs"]) for choice in choices]
        if top is not None:
            scored = self._prompt_logprobs(tenant_of(request), name, tokens, top)
            reply["prompt_logprobs"] = await while_connected(request, scored)
        return JSONResponse(reply, headers=headers)

    async def _prompt_logprobs(
        self, tenant: str, name: str, tokens: Sequence[int], k: int
    ) -> list[dict[str, float] | None]:
        """Return each prompt token's log-probability and those of the k most likely; None for the first token."""
        ref = await self.models.resolve(tenant, name)
        prompt, params = np.array(tokens, np.int32), SamplingParams(max_tokens=1, temperature=0)
        scored = {"prompt_logprobs": True, "topk_prompt_logprobs": max(k, 1)}
        result = await self.services.sample(tenant, ref, prompt, params, seconds=_SECONDS, **scored)
        topk, own = result.topk_prompt_logprobs, result.prompt_logprobs
        if topk is None or own is None:
            raise errors.EngineUnavailable("the sampler did not score the prompt; try again")
        found: list[dict[str, float] | None] = [None]
        for row in range(1, len(tokens)):
            pairs = zip(topk.token_ids[row][:k].tolist(), topk.logprobs[row][:k].tolist(), strict=True)
            likeliest = {str(token): value for token, value in pairs if not isnan(value)}
            found.append({str(tokens[row]): float(own[row])} | likeliest)
        return found


def _positions(logprobs: Mapping[str, Any]) -> list[list[dict[str, float]]]:
    """Return a list of one object per sampled token: its id and log-probability first, then the most likely tokens."""
    rows = []
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    for name, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        others = {other.removeprefix(_PREFIX): known for other, known in (top or {}).items()}
        rows.append([{name.removeprefix(_PREFIX): value} | others])
    return rows

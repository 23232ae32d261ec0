"""Every way to sample through a gateway, each asked in the words of its own API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

import paceline
from paceline import SamplingParams, errors
from paceline.tinker.v1 import tinker_pb2

MESSAGES = [{"role": "user", "content": "Peru"}]


@dataclass(frozen=True)
class Completion:
    """What was sampled after which prompt."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Refused(Exception):
    """A refusal; its text has the name of the field."""


@dataclass(frozen=True)
class Doors:
    """The doors of a running deployment."""

    service: paceline.ServiceClient
    http: httpx.Client
    """With the gateway's HTTP port as its base, and a key."""
    tinker_sessions: dict[str, str] = field(default_factory=dict)

    def grpc(self, model: str, prompt: Sequence[int], **asked: Any) -> list[Completion]:
        more = {name: asked.pop(name) for name in ("topk_logprobs", "topk_prompt_logprobs") if name in asked}
        count = asked.pop("n", 1)
        with _refused():
            result = self._client(model).sample(list(prompt), count, SamplingParams(**asked), **more).result()
        return [Completion(list(prompt), one.tokens.tolist(), one.logprobs.tolist()) for one in result.sequences]

    def stream(self, model: str, prompt: Sequence[int], **asked: Any) -> list[Completion]:
        found = [Completion(list(prompt), [], []) for _ in range(asked.get("n", 1))]
        with _refused():
            for part in self._client(model).sample_stream(list(prompt), asked.pop("n", 1), SamplingParams(**asked)):
                found[part.index].tokens.extend(part.tokens)
                found[part.index].logprobs.extend(part.logprobs)
        return found

    def completions(self, model: str, prompt: Sequence[int], **asked: Any) -> list[Completion]:
        asked = _renamed(asked, topk_logprobs="logprobs", topk_prompt_logprobs="prompt_logprobs")
        body = {"model": model, "prompt": list(prompt), "logprobs": 0, "max_tokens": None, "return_token_ids": True}
        answer = self._post("/v1/completions", **body | asked)
        return [
            Completion(list(prompt), choice["token_ids"], choice["logprobs"]["token_logprobs"])
            for choice in answer["choices"]
        ]

    def chat(self, model: str, prompt: Sequence[int], **asked: Any) -> list[Completion]:
        del prompt  # the chat template makes it
        asked = _renamed(asked, topk_logprobs="top_logprobs", max_tokens="max_completion_tokens")
        body = {"model": model, "messages": MESSAGES, "logprobs": True, "return_token_ids": True}
        answer = self._post("/v1/chat/completions", **body | asked)
        return [
            Completion(
                answer["prompt_token_ids"],
                choice["token_ids"],
                [token["logprob"] for token in choice["logprobs"]["content"]],
            )
            for choice in answer["choices"]
        ]

    def generate(self, model: str, prompt: Sequence[int], **asked: Any) -> list[Completion]:
        asked = _renamed(asked, topk_logprobs="logprobs", topk_prompt_logprobs="prompt_logprobs")
        body = {"prompt": {"prompt_token_ids": list(prompt)}, "logprobs": 0}
        answer = self._post(f"/weights/{model}/generate", **body | asked)
        return [
            Completion(answer["prompt_token_ids"], tokens, [next(iter(row[0].values())) for row in rows])
            for tokens, rows in zip(answer["token_ids"], answer["logprobs"], strict=True)
        ]

    def tinker(self, model: str, prompt: Sequence[int], **asked: Any) -> list[Completion]:
        asked = _renamed(asked, n="num_samples", topk_logprobs="topk_sample_logprobs")
        fields = ("num_samples", "topk_sample_logprobs", "topk_prompt_logprobs")
        body = {name: asked.pop(name) for name in fields if name in asked}
        if asked.pop("ignore_eos", False):
            asked["stop"] = []
        asked["stop"] = asked.pop("stop_token_ids", asked.get("stop"))
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        number = self.tinker_sessions.setdefault("seq_id", "0")
        self.tinker_sessions["seq_id"] = str(int(number) + 1)
        sampler = self._tinker_sampler(model)
        made = self._post(
            "/api/v1/asample",
            sampling_session_id=sampler,
            seq_id=int(number),
            prompt={"chunks": chunks},
            **{"sampling_params": asked, **body},
        )
        while (found := self.http.post("/api/v1/retrieve_future", json={"request_id": made["request_id"]})) is not None:
            if found.status_code != 408:
                break
        if "json" in found.headers["content-type"]:
            raise Refused(found.text)
        sequences = tinker_pb2.SampleResponse.FromString(found.content).sequences
        return [
            Completion(
                list(prompt), np.frombuffer(one.tokens, "<i4").tolist(), np.frombuffer(one.logprobs, "<f4").tolist()
            )
            for one in sequences
        ]

    def metaclaw(self, model: str, prompt: Sequence[int], **asked: Any) -> list[Completion]:
        neutral = {"temperature": 1.0, "top_k": -1, "top_p": 1.0}
        body = neutral | {"tokens": list(prompt)} | _renamed(asked, n="num_samples")
        answer = self._post("/v1/sample", session_id=model, **body)
        return [Completion(list(prompt), one["tokens"], one["logprobs"]) for one in answer["sequences"]]

    def _client(self, model: str) -> paceline.SamplingClient:
        if model.startswith("run-"):
            return self.service.create_sampling_client(run_id=model)
        return self.service.create_sampling_client()

    def _tinker_sampler(self, model: str) -> str:
        if model not in self.tinker_sessions:
            session = self._post("/api/v1/create_session", tags=[], user_metadata=None, sdk_version="0")
            of_run = {"model_path": f"tinker://{model}/sampler_weights/mine"}
            named = of_run if model.startswith("run-") else {"base_model": model}
            made = self._post(
                "/api/v1/create_sampling_session",
                **{
                    "session_id": session["session_id"],
                    "sampling_session_seq_id": 0,
                    **named,
                },
            )
            self.tinker_sessions[model] = made["sampling_session_id"]
        return self.tinker_sessions[model]

    def _post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        if not answer.is_success:
            raise Refused(answer.text)
        return answer.json()


OF_ENGINE = {
    "hf": ("grpc", "stream", "tinker", "metaclaw"),
    "vllm": ("grpc", "stream", "tinker", "metaclaw", "completions", "chat", "generate"),
}


@contextmanager
def _refused() -> Iterator[None]:
    """Raise an error of the client as Refused."""
    try:
        yield
    except errors.PacelineError as error:
        raise Refused(f"{error.field}: {error}") from error


def _renamed(asked: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in asked.items()}

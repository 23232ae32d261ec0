"""Hostile requests for the gateway's HTTP port: the same seed and number give the same request."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from typing import Any

import zstandard

_FIELDS = {
    "/api/v1/client/config": ("sdk_version",),
    "/api/v1/create_session": ("tags", "user_metadata", "sdk_version", "display_name"),
    "/api/v1/session_heartbeat": ("session_id",),
    "/api/v1/create_model": ("session_id", "model_seq_id", "base_model", "lora_config", "optimizer_config"),
    "/api/v1/get_info": ("model_id",),
    "/api/v1/optim_step": ("model_id", "seq_id", "adam_params", "optimizer_params"),
    "/api/v1/save_weights": ("model_id", "seq_id", "path", "ttl_seconds", "overwrite", "user_metadata"),
    "/api/v1/save_weights_for_sampler": ("model_id", "seq_id", "path", "sampling_session_seq_id", "kind"),
    "/api/v1/save_weights_external": ("model_id", "seq_id", "path", "age_encryption_recipients"),
    "/api/v1/load_weights": ("model_id", "seq_id", "session_id", "model_seq_id", "path", "optimizer"),
    "/api/v1/create_sampling_session": ("session_id", "sampling_session_seq_id", "base_model", "model_path"),
    "/api/v1/asample": ("sampling_session_id", "seq_id", "prompt", "sampling_params", "num_samples"),
    "/api/v1/retrieve_futures": ("target", "prev_cursor", "timeout"),
    "/api/v1/cancel_future": ("request_id",),
    "/api/v1/weights_info": ("tinker_path",),
    "/v1/completions": ("model", "prompt", "stream", "n", "logprobs", "max_tokens"),
    "/v1/chat/completions": ("model", "messages", "tools", "stream"),
    "/v1/lora/create": ("base_model", "rank"),
    "/v1/train/forward_backward": ("session_id", "datums", "loss_fn"),
    "/v1/train/optim_step": ("session_id", "learning_rate"),
    "/v1/checkpoint/load": ("session_id", "path"),
    "/v1/sample": ("tokens", "num_samples", "temperature", "max_tokens", "top_k", "top_p", "stop", "session_id"),
    "/generate": ("prompt", "logprobs", "model", "max_tokens"),
    "/train": ("model", "conversations", "pairs", "learning_rate", "batch_size", "optimizer", "lora"),
    "/checkpoint": ("model", "name"),
    "/weights/x/generate": ("prompt", "logprobs", "prompt_logprobs"),
}
"""POST paths and the fields of their bodies, without the paths that wait half a minute for a result."""
_GETS = (
    "/api/v1/training_runs?limit={0}&offset={1}",
    "/api/v1/training_runs/{0}",
    "/api/v1/training_runs/{0}/checkpoints",
    "/api/v1/checkpoints?limit={0}",
    "/api/v1/sessions/{0}",
    "/api/v1/samplers/{0}",
    "/api/v1/downloads/{0}/{1}",
    "/api/v1/training_runs/{0}/checkpoints/weights/{1}/external_weights_urls",
    "/v1/models",
    "/v1/models/{0}",
    "/weights/{0}/health",
    "/train/status?model={0}",
    "/{0}",
)
_TEXTS = ("", "x", "\0", "ä" * 40, "../../etc/passwd", "%2e%2e%2f", "😀", "a" * 5000, "run-", "tinker://a/weights/b",
          "paceline://", "-1", "1e999", "run-" + "0" * 32 + "@1", "a@b@c")  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 64, 2**31, 2**53, 2**63 - 1, 2**63, -(2**70), 1e308, 0.5, -0.0)
_SMALL = ("chunks", "tokens", "type", "rank", "learning_rate", "max_tokens", "stop", "seed", "sampling_session_id")
_MAX_DEPTH = 4


@dataclass(frozen=True)
class HttpCase:
    """One request."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    content: bytes


class HttpCaseMaker:
    """Makes requests, some of them about the caller's own objects."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self._seed, self._names = seed, names

    def make(self, number: int) -> HttpCase:
        """Make the request with this number."""
        rng = random.Random(f"{self._seed}/http/{number}")
        if rng.random() < 0.2:
            texts = [_quoted(self._text(rng)) for _ in range(2)]
            return HttpCase(number, rng.choice(("GET", "DELETE")), rng.choice(_GETS).format(*texts), {}, b"")
        if rng.random() < 0.15:
            return self._forward_backward(rng, number)
        if rng.random() < 0.05:
            return self._train(rng, number)
        path, fields = rng.choice(list(_FIELDS.items()))
        body = {name: self._value(rng, 0) for name in fields if rng.random() < 0.8}
        if rng.random() < 0.1:
            body = rng.choice([[], None, 1, "x", {"a": body}])
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        if rng.random() < 0.1:
            content = _damaged(rng, content)
        headers = {"Content-Type": rng.choice(("application/json", "text/plain", "x"))} if rng.random() < 0.2 else {}
        return HttpCase(number, "POST", path, headers, content)

    def _train(self, rng: random.Random, number: int) -> HttpCase:
        """Make a request with conversations that look right at first."""
        roles = ("system", "user", "assistant", "tool", self._text(rng))
        messages = [
            {"role": rng.choice(roles), "content": rng.choice((self._text(rng), self._value(rng, 2)))}
            for _ in range(rng.choice((1, 2, 3, 60)))
        ]
        body = {"model": rng.choice(("a", "b", "c")), "conversations": [messages], "lora": {"rank": 2}}
        return HttpCase(number, "POST", "/train", {}, json.dumps(body).encode("utf-8", "surrogatepass"))

    def _forward_backward(self, rng: random.Random, number: int) -> HttpCase:
        content = rng.randbytes(rng.choice((0, 1, 40, 3000)))
        if rng.random() < 0.7:
            model = rng.choice(self._names).encode()
            content = (
                b"\x0a" + bytes([len(model) % 128]) + model[:127] + b"\x10" + bytes([rng.randrange(128)]) + content
            )
        headers = {}
        if rng.random() < 0.4:
            headers["Content-Encoding"] = rng.choice(("zstd", "gzip", "identity", "x"))
            if rng.random() < 0.7:
                content = zstandard.compress(content * rng.choice((1, 1, 2000)))
        return HttpCase(number, "POST", "/api/v1/forward_backward", headers, content)

    def _value(self, rng: random.Random, depth: int) -> Any:
        kind = rng.randrange(8 if depth < _MAX_DEPTH else 5)
        if kind < 2:
            return self._text(rng)
        if kind < 4:
            return rng.choice((*_NUMBERS, float("nan"), float("inf")))
        if kind == 4:
            return rng.choice((None, True, False))
        if kind == 5:
            return [self._value(rng, depth + 1) for _ in range(rng.choice((0, 1, 3, 200 if depth == 0 else 2)))]
        return {rng.choice((*_SMALL, self._text(rng))): self._value(rng, depth + 1) for _ in range(rng.randrange(5))}

    def _text(self, rng: random.Random) -> str:
        return rng.choice(self._names) if rng.random() < 0.5 else rng.choice(_TEXTS)


def _quoted(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode()) or "-"


def _damaged(rng: random.Random, content: bytes) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + struct.pack("<Q", rng.getrandbits(64)) + content[place + rng.randrange(9) :]

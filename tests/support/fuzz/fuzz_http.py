"""Hostile requests for the gateway's HTTP port: the same seed and number give the same request."""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zstandard

from gateway.admission import FairQueue
from gateway.deployment import Deployment
from gateway.http.apis import HttpApis
from gateway.http.services import Services
from gateway.proxy import Router, Upstream
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from paceline.requests.waiting_bytes import WaitingBytes
from support.fuzz.valid_http import BATCHES, FORWARD_BACKWARD, MESSAGES, MORE, HttpOwned, valid_bodies

_FIELDS = {
    "/api/v1/forward_backward": ("model_id", "seq_id", "data"),
    "/api/v1/telemetry": ("events", "session_id"),
    "/v1/completions": ("model", "prompt", "stream", "n", "logprobs", "max_tokens"),
    "/v1/chat/completions": ("model", "messages", "tools", "stream"),
    "/weights/{weights}/v1/completions": ("prompt", "stream", "n", "logprobs", "max_tokens"),
    "/weights/{weights}/v1/chat/completions": ("messages", "tools", "stream"),
    "/generate": ("prompt", "logprobs", "model", "max_tokens"),
    "/weights/{weights}/generate": ("prompt", "logprobs", "prompt_logprobs"),
    "/train": ("model", "conversations", "pairs", "learning_rate", "batch_size", "optimizer", "lora"),
    "/checkpoint": ("model", "name"),
    "/v1/train/forward_backward": ("session_id", "datums", "loss_fn"),
}
"""The fields of bodies that a route reads itself, without a model of FastAPI's."""
_WAITS = frozenset({"/api/v1/retrieve_future", "/ui/api/runs/{run_id}/watch"})
"""Routes that are left out, because a request may wait half a minute for a result, or minutes for rows."""
ENDS = (
    "/api/v1/sessions/{session_id}/finish",
    "/api/v1/unload_model",
    "/api/v1/training_runs/{model_id}/checkpoints/{folder}/{name}",
)
"""Routes that end what they name: each has a session of its own, so that the others find theirs."""
_VALID = 0.5
_PACKED = 0.05
"""Share of the bodies in JSON that are sent compressed."""
_ASKED_FIRST = 0.02
"""Share of the requests in whose place a browser asks whether it may send them."""
_BOMBS = (
    b'{"messages": [' + b"{}," * 300_000 + b"{}]}",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"model": "a", "conversations": [' + b"[]," * 300_000 + b"[]]}",
    b" " * (40 << 20),
)
"""Bodies that are small when they are compressed."""
"""Share of the requests to a route that start from a valid one, if there is one."""
_AHEAD = (1, 1, 1, 1, 1, 1, 0, -1, 2, 3)
_AMOUNTS = frozenset({"max_tokens", "n", "num_samples", "batch_size", "rank"})
"""Fields that take only values that are small or refused, since the work grows with them."""
_METHODS = ("GET", "POST", "PUT", "DELETE")
_TEXTS = ("", "x", "\0", "ä" * 40, "../../etc/passwd", "%2e%2e%2f", "😀", "a" * 5000, "run-", "tinker://a/weights/b",
          "paceline://", "-1", "1e999", "run-" + "0" * 32 + "@1", "a@b@c",
          "model@newest", "model@0", "a\u2028b\u2029c\u0085d")  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 64, 2**31, 2**53, 2**63 - 1, 2**63, -(2**70), 1e308, 0.5, -0.0)
_SMALL = ("chunks", "tokens", "type", "rank", "learning_rate", "max_tokens", "stop", "seed", "sampling_session_id")
_JSON = "application/json"
_MAX_DEPTH = 4
_PART = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class HttpRoute:
    """One route of the gateway's application."""

    method: str
    path: str
    """With the names of its parts in braces."""
    fields: tuple[str, ...]
    """Fields of the body."""
    query: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


async def http_routes() -> list[HttpRoute]:
    """Return every route that the gateway serves, except those that wait."""
    with TemporaryDirectory() as state:
        trainer, waiting_bytes = Upstream("trainer", "localhost:1", None), WaitingBytes()
        services = Services(Router(trainer, [], 0), Tenants(), FairQueue(1, 1, 1), waiting_bytes)
        settings = GatewaySettings(http_state=Path(state), insecure=True)
        deployment = Deployment(services.router, services.tenants, services.queue, waiting_bytes, settings)
        apis = HttpApis(settings, (), services, deployment, waiting_bytes)
        await apis.stop()
        await trainer.close()
    app = apis.app
    found = []
    for route in app.routes:
        fields = _FIELDS.get(route.path, ())
        for body in route.dependant.body_params:
            fields = tuple(body.field_info.annotation.model_fields)
        query = tuple(field.alias for field in route.dependant.query_params)
        methods = () if route.path in _WAITS else sorted(route.methods)
        found += [HttpRoute(method, route.path_format, fields, query) for method in methods]
    return found


@dataclass(frozen=True)
class HttpCase:
    """One request."""

    number: int
    route: str
    """The route that it is made for."""
    method: str
    path: str
    headers: dict[str, str]
    content: bytes


class HttpCaseMaker:
    """Makes requests, some of them about the caller's own objects."""

    def __init__(self, seed: int, routes: list[HttpRoute], owned: HttpOwned, spares: dict[str, HttpOwned]) -> None:
        """`spares` has what each of `ENDS` names instead of what is `owned`."""
        self._seed, self._owned, self._spares = seed, owned, spares
        # More batches than other commands, because a step needs a gradient.
        self._routes = [*routes, *[route for route in routes if route.path in BATCHES] * 6]
        self._names: list[str] = []

    def make(self, number: int) -> HttpCase:
        """Make the request with this number."""
        rng = random.Random(f"{self._seed}/http/{number}")
        self._names = self._owned.names
        if rng.random() < 0.1:
            return self._forward_backward(rng, number)
        if rng.random() < 0.03:
            return self._train(rng, number)
        route = rng.choice(self._routes)
        owned = self._spares.get(route.path, self._owned)
        self._names = owned.names
        if rng.random() < _VALID:
            return self._nearly_valid(rng, number, route, owned)
        method = rng.choice(_METHODS) if rng.random() < 0.05 and route.path not in ENDS else route.method
        path = self._path(rng, route)
        if method in {"GET", "DELETE"}:
            return HttpCase(number, str(route), method, path, {}, b"")
        body = {name: self._value(rng, 0) for name in route.fields if rng.random() < 0.8}
        if rng.random() < 0.1:
            body = rng.choice([[], None, 1, "x", {"a": body}])
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        if rng.random() < 0.1:
            content = _damaged(rng, content)
        # A body of another type, or of none, is refused before it is read.
        kind = rng.choice(("text/plain", "x", "")) if rng.random() < 0.1 else _JSON
        headers = {"Content-Type": kind} if kind else {}
        return HttpCase(number, str(route), method, path, headers, content)

    def _nearly_valid(self, rng: random.Random, number: int, route: HttpRoute, owned: HttpOwned) -> HttpCase:
        """Make a valid request of whose body at most two values are changed."""
        path = _PART.sub(lambda part: _quoted(owned.part(part[1]) or self._text(rng)), route.path)
        seq_id = max(0, owned.run.last_seq_id + rng.choice(_AHEAD))
        body = valid_bodies(owned, number, seq_id).get(route.path) if route.method == "POST" else None
        changes, headers = rng.choice((0, 0, 0, 0, 1, 1, 2)), {"Content-Type": _JSON}
        if isinstance(body, bytes):
            content, headers = _damaged(rng, body) if changes else body, {}
        elif body is None:
            content, headers = b"", {}
        else:
            if more := MORE.get(route.path):
                for name in rng.sample(sorted(more), min(len(more), rng.choice((0, 0, 1, 2)))):
                    body[name] = rng.choice(more[name])
            for _ in range(changes):
                self._change(rng, body)
            content = json.dumps(body).encode("utf-8", "surrogatepass")
            if rng.random() < _PACKED:
                content, headers["Content-Encoding"] = _packed(rng, content)
        if rng.random() < _ASKED_FIRST:
            asks = {"Origin": "http://a.example", "Access-Control-Request-Method": route.method}
            return HttpCase(number, str(route), "OPTIONS", path, asks, b"")
        return HttpCase(number, str(route), route.method, path, headers, content)

    def _change(self, rng: random.Random, body: dict[str, Any]) -> None:
        """Replace or remove a value, perhaps of an object within."""
        inner = [one for value in body.values() for one in (value if isinstance(value, list) else [value])]
        inner = [one for one in inner if isinstance(one, dict) and one]
        if inner and rng.random() < 0.5:
            self._change(rng, rng.choice(inner))
        elif body:
            name = rng.choice(list(body))
            if name in _AMOUNTS:
                body[name] = rng.choice((0, 1, 4, -1, 2**70, 0.5, "x", None, [1]))
            elif rng.random() < 0.3:
                del body[name]
            elif rng.random() < 0.2:
                body[name] = None
            else:
                body[name] = self._value(rng, 0)

    def _path(self, rng: random.Random, route: HttpRoute) -> str:
        path = _PART.sub(lambda part: _quoted(self._part(rng, part[1])), route.path)
        query = [f"{name}={_quoted(self._part(rng, name))}" for name in route.query if rng.random() < 0.5]
        return "?".join([path, "&".join(query)] if query else [path])

    def _part(self, rng: random.Random, name: str) -> str:
        """Return a part of a path or of a query, often one that exists."""
        known = {
            "folder": ("weights", "sampler_weights"),
            "name": ("a",),
            "limit": ("1", "100", "0", "-1", "10001"),
            "offset": ("0", "1", "-1", str(10**12), str(2**64)),
        }
        if name in known and rng.random() < 0.5:
            return rng.choice(known[name])
        return self._text(rng)

    def _train(self, rng: random.Random, number: int) -> HttpCase:
        """Make a request with conversations that look right at first."""
        roles = ("system", "user", "assistant", "tool", self._text(rng))
        messages = [
            {"role": rng.choice(roles), "content": rng.choice((self._text(rng), self._value(rng, 2)))}
            for _ in range(rng.choice((1, 2, 3, 60)))
        ]
        messages += rng.sample(MESSAGES, rng.choice((0, 1, 2)))
        body = {"model": rng.choice(("a", "b", "c")), "conversations": [messages], "lora": {"rank": 2}}
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        return HttpCase(number, "POST /train", "POST", "/train", {"Content-Type": _JSON}, content)

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
        return HttpCase(number, f"POST {FORWARD_BACKWARD}", "POST", FORWARD_BACKWARD, headers, content)

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


def _packed(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Return a body, perhaps another one that expands far, compressed, and its encoding."""
    content = rng.choice(_BOMBS) if rng.random() < 0.3 else content
    how = rng.choice(("zstd", "gzip"))
    return (zstandard.compress(content) if how == "zstd" else gzip.compress(content, 1, mtime=0)), how


def _damaged(rng: random.Random, content: bytes) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + struct.pack("<Q", rng.getrandbits(64)) + content[place + rng.randrange(9) :]

"""Fire hostile calls at three real services while another tenant trains, and report the outcome."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import grpc
import numpy as np
import psutil
from yarl import URL

import paceline
from gateway.keys import add_key
from paceline import types
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import DETAILS_KEY
from support.fuzz.fuzz_cases import Case, CaseMaker, path_of
from support.fuzz.fuzz_http import HttpCase, HttpCaseMaker
from support.stacks.cluster import Cluster

SETTINGS = {
    "PACELINE_TRAINER_GAP_WAIT_SECONDS": "0.05",
    "PACELINE_TRAINER_JOINT_PASSES": "false",
    "PACELINE_GATEWAY_LOG_LEVEL": "ERROR",
    "PACELINE_TRAINER_LOG_LEVEL": "ERROR",
    "PACELINE_SAMPLER_LOG_LEVEL": "ERROR",
}
_IN_FLIGHT = 256
_SECONDS = 3.0
_HTTP_SECONDS = 60.0
_STEPS = 6
_REFUSED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
_CLIENT_GAVE_UP = "Internal error from Core"
"""The error of grpc's own client when a stream's status arrives while a message is being written."""


@dataclass
class Outcome:
    """The outcome of the cases."""

    codes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Bytes of the three services and their children, sampled at equal intervals."""
    losses: list[float] = field(default_factory=list)
    """The canary's losses while the cases run."""
    expected: list[float] = field(default_factory=list)
    """The canary's losses without the cases."""


@dataclass
class Fuzz:
    """Fuzzes a cluster."""

    cluster: Cluster
    seed: int

    async def run(self, first: int, cases: int) -> Outcome:
        """Run `cases` cases, starting with number `first`."""
        outcome = Outcome()
        key = add_key(self.cluster.state / "keys.json", "hostile", f"hostile-{self.seed}-{first}")
        outcome.expected = await asyncio.to_thread(train, self.cluster)
        names = await self._own_names(key)
        maker = CaseMaker(self.seed, names)
        canary = asyncio.create_task(asyncio.to_thread(train, self.cluster))
        credential = (self.cluster.state / "credential").read_text().strip()
        trainer = self.cluster.gateway.plan.environment["PACELINE_GATEWAY_TRAINER"]
        sampler = self.cluster.gateway.plan.environment["PACELINE_GATEWAY_SAMPLERS"]
        http = HttpCaseMaker(self.seed, await self._http_names(key))
        async with (
            self._http(key) as edge,
            open_channel(self.cluster.address) as front,
            open_channel(trainer) as t,
            open_channel(sampler) as s,
        ):
            own = (("authorization", f"Bearer {key}"),)
            peer = tuple(peer_metadata(credential))
            numbers = iter(range(first, first + cases))

            async def work() -> None:
                for number in numbers:
                    if number % 6 == 5:
                        await self._request(edge, http.make(number), outcome)
                        continue
                    case = maker.make(number)
                    # Call services directly too, with what the gateway would forward and with what it would not.
                    package = case.method.containing_service.full_name
                    direct = t if ".sampler." not in package else s
                    if number % 5 == 4 and ".gateway." not in package:
                        await self._call(direct, case, (*own, *peer_metadata(credential, "hostile")), outcome)
                    elif number % 5 == 3 and path_of(case.method).endswith(("WatchVersions", "UpdateWeights")):
                        await self._call(direct, case, peer, outcome)
                    else:
                        await self._call(front, case, own, outcome)
                    if number % max(1, cases // 10) == 0:
                        outcome.memory.append(self.memory())

            await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
        outcome.losses = await canary
        outcome.memory.append(self.memory())
        for service in self.cluster.services.values():
            if "uncaught" in service.log.read_text(errors="replace"):
                outcome.failures.append(f"{service.plan.name} met an exception that nobody foresaw:\n{service.tail()}")
            if service.process.poll() is not None:
                outcome.failures.append(f"{service.plan.name} ended:\n{service.tail()}")
        return outcome

    def _http(self, key: str) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=32)
        timeout = aiohttp.ClientTimeout(sock_connect=_HTTP_SECONDS, sock_read=_HTTP_SECONDS)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers={"X-API-Key": key})
        session._retry_connection = False  # else a GET whose connection the gateway drops is sent again unnoticed
        return session

    def _url(self, path: str) -> URL:
        address = self.cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
        return URL(f"http://{address}{path}", encoded=True)

    async def _http_names(self, key: str) -> list[str]:
        """Make a session and a model; return their names."""
        async with self._http(key) as edge:

            async def post(name: str, body: dict[str, object]) -> dict[str, str]:
                async with edge.post(self._url(f"/api/v1/{name}"), json=body) as answer:
                    return await answer.json()

            session = (await post("create_session", {}))["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": {"rank": 2}}
            future = await post("create_model", body)
            await post("retrieve_future", future)
        return [session, future["model_id"], f"tinker://{future['model_id']}/weights/a", f"{session}:sample:0", "model"]

    async def _request(self, edge: aiohttp.ClientSession, case: HttpCase, outcome: Outcome) -> None:
        """Send a request; note a failure on an unexpected 5xx status, or on an error without an explanation in JSON."""
        sent = edge.request(
            case.method,
            self._url(case.path),
            data=case.content or None,
            headers=case.headers,
            skip_auto_headers=["Content-Type"],
            allow_redirects=False,
        )
        try:
            async with sent as answer:
                status, text = answer.status, await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome.failures.append(f"http case {case.number}, {case.method} {case.path[:80]}: {error!r}")
            return
        outcome.codes[f"HTTP {status}"] += 1
        is_known = status < 500 or status in {503, 504}
        if not is_known or (status >= 400 and "detail" not in text):
            text = f"{case.method} {case.path[:80]}: {status} {text[:200]}"
            outcome.failures.append(f"http case {case.number}, {text}")

    async def _own_names(self, key: str) -> list[str]:
        async with paceline.ServiceClient(self.cluster.address, key) as service:
            training = await service.create_lora_training_client_async(rank=2)
            return [training.run_id, f"paceline://{training.run_id}/state/a", f"paceline://{training.run_id}/sampler/a"]

    async def _call(self, channel: grpc.aio.Channel, case: Case, identity: tuple, outcome: Outcome) -> None:
        metadata = [pair for pair in case.metadata if pair[0] not in dict(identity)] + list(identity)
        path, streams = path_of(case.method), case.method.server_streaming
        if case.method.client_streaming or len(case.messages) != 1:
            call = channel.stream_stream(path)(_each(case.messages), metadata=metadata, timeout=_SECONDS)
            answer = _drain(call)
        elif streams:
            call = channel.unary_stream(path)(case.messages[0], metadata=metadata, timeout=_SECONDS)
            answer = _drain(call)
        else:
            call = channel.unary_unary(path)(case.messages[0], metadata=metadata, timeout=_SECONDS)
            answer = _wait(call)
        if case.leaves:
            await asyncio.sleep(0)
            call.cancel()
        try:
            await answer
            outcome.codes["OK"] += 1
        except asyncio.CancelledError:
            outcome.codes["left"] += 1
        except grpc.aio.AioRpcError as failure:
            code = failure.code()
            outcome.codes[code.name] += 1
            typed = any(name == DETAILS_KEY for name, _ in failure.trailing_metadata() or ())
            untyped = code is grpc.StatusCode.UNAVAILABLE and not typed
            if (code in _REFUSED and failure.details() != _CLIENT_GAVE_UP) or untyped:
                outcome.failures.append(f"{code.name} {failure.details()}: seed {self.seed} {case}")

    def memory(self) -> int:
        """Return the resident bytes of the services and their children."""
        total = 0
        for service in self.cluster.services.values():
            parent = psutil.Process(service.process.pid)
            total += sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))
        return total


def train(cluster: Cluster) -> list[float]:
    """Train a run of the canary; return its losses."""
    rng = np.random.default_rng(0)
    losses = []
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        training = service.create_lora_training_client(rank=4, seed=3)
        for _ in range(_STEPS):
            tokens = rng.integers(256, size=33).astype(np.int64)
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(32, np.float32)}
            done = training.forward_backward([types.Datum(tokens[:-1].astype(np.int32), inputs)]).result()
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            losses.append(done.metrics["loss:sum"])
    return losses


def is_flat(memory: list[int]) -> bool:
    """Whether memory grows by at most a fifth, or 256 MiB, after the first fifth of the cases."""
    settled = memory[len(memory) // 5]
    return memory[-1] <= settled + max(settled // 5, 256 << 20) and math.isfinite(settled)


async def _each(messages: list[bytes]):
    for message in messages:
        yield message


async def _drain(call) -> None:
    async for _ in call:
        pass


async def _wait(call) -> None:
    await call

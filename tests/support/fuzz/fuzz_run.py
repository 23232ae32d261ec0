"""Fire hostile calls at three real services while another tenant trains, and report the outcome."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import grpc
import numpy as np
import psutil
from yarl import URL

import paceline
from paceline import errors, types
from paceline.files.key_changes import add_key
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import is_from_grpc
from support.fuzz.fuzz_cases import ENDS, Case, CaseMaker, methods, path_of
from support.fuzz.fuzz_http import ENDS as HTTP_ENDS
from support.fuzz.fuzz_http import HttpCase, HttpCaseMaker, http_routes
from support.fuzz.valid_http import FORWARD_BACKWARD, HttpOwned, valid_bodies
from support.fuzz.valid_requests import CONVERSATION, WITHOUT_VALID, Owned
from support.stacks.cluster import Cluster

SETTINGS = {
    "PACELINE_TRAINER_GAP_WAIT_SECONDS": "0.05",
    "PACELINE_TRAINER_JOINT_PASSES": "false",
    "PACELINE_GATEWAY_LOG_LEVEL": "ERROR",
    "PACELINE_TRAINER_LOG_LEVEL": "ERROR",
    "PACELINE_SAMPLER_LOG_LEVEL": "ERROR",
}
CONTEXT = 64
"""The model's context length: short, since a sample without `max_tokens` is as long as its context."""
_IN_FLIGHT = 256
_SECONDS, _HTTP_SECONDS = 3.0, 60.0
"""How long a call and a request may take beside others, on a machine that may be busy with more than them."""
_SECONDS_ALONE = 90.0
"""How long one that was not answered in time may take when it is repeated alone: more than a publish waits for
acknowledgements if it does not say how long.
"""
_MAX_HANGING = 5
_WAITS = frozenset(
    {"/paceline.weights.v1.WeightService/WatchVersions", "/paceline.metrics.v1.MetricsService/WatchMetrics"}
)
"""Methods whose calls last until the caller leaves."""
_FOLLOW_SECONDS = 0.2
_RETRIEVE, _CANCEL = "/api/v1/retrieve_future", "/api/v1/cancel_future"
_FUTURE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_COMPLETES_TEXT = re.compile("completions$|/generate$")
"""Routes that end in CompleteText, which the engine hf does not serve."""
_NOTHING = HttpOwned("", "", "", "", "", Owned("", "", ""))
_PAUSE_SECONDS = 1.0
"""Between two runs of the canary, so that most of the time is left to the cases."""
ENOUGH_CASES = 20_000
"""From this number of cases on, each method and each route that has a valid request accepts some."""
_REACHED = ("GET /api/v1/", "GET /v1/", "GET /weights/")
"""How the routes begin of each HTTP API that is not posted to."""
_ALARMS = ("uncaught", "engine died")
"""What the services log about exceptions that nobody foresaw, and about the end of an engine."""
_GRADIENTS = (
    "/paceline.trainer.v1.TrainerService/ForwardBackward",
    f"POST {FORWARD_BACKWARD}",
    "POST /v1/train/forward_backward",
)
"""What steps need before them."""
_STEPS = 6
_REFUSED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
_UNANSWERED = "unanswered"
"""Outcome of a call whose time ran out. DEADLINE_EXCEEDED is an answer: a publish was not acknowledged in its time."""
_CLIENT_GAVE_UP = "Internal error from Core"
"""The error of grpc's own client when a stream's status arrives while a message is being written."""


@dataclass
class Outcome:
    """The outcome of the cases."""

    codes: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    """How often each method and route that was called did what it was asked."""
    failures: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Bytes of the three services and their children, sampled at equal intervals."""
    trained: int = 0
    """How often the canary trained its run beside the cases."""


@dataclass(frozen=True)
class _Channels:
    """Channels to the services, and what identifies the hostile tenant there."""

    gateway: grpc.aio.Channel
    trainer: grpc.aio.Channel
    sampler: grpc.aio.Channel
    edge: aiohttp.ClientSession
    """The gateway's HTTP port."""
    tenant: str
    key: str
    credential: str

    def choose(self, case: Case) -> tuple[grpc.aio.Channel, tuple]:
        """Return the channel for a case and its metadata.

        Some cases call services directly, with what the gateway would forward and with what it would not.
        """
        path, own = path_of(case.method), (("authorization", f"Bearer {self.key}"),)
        direct = self.sampler if ".sampler." in path else self.trainer
        if case.number % 5 == 4 and ".gateway." not in path:
            return direct, (*own, *peer_metadata(self.credential, self.tenant))
        if case.number % 5 == 3 and path.endswith(("WatchVersions", "UpdateWeights")):
            return direct, tuple(peer_metadata(self.credential))
        return self.gateway, own


@dataclass(frozen=True)
class _Makers:
    """Makers of cases, and the runs that most of their commands continue."""

    grpc: CaseMaker
    http: HttpCaseMaker
    runs: tuple[Owned, ...]

    def make(self, number: int) -> Case | HttpCase:
        """Make the case with this number."""
        return self.http.make(number) if number % 6 == 5 else self.grpc.make(number)


@dataclass
class Fuzz:
    """Fuzzes a cluster."""

    cluster: Cluster
    seed: int

    async def run(self, first: int, cases: int) -> Outcome:
        """Run `cases` cases, starting with number `first`."""
        outcome = Outcome()
        tenant = f"hostile-{self.seed}-{first}"  # a new one, since the runs of earlier ones count
        key = add_key(self.cluster.state / "keys.json", tenant, tenant)
        expected = await asyncio.to_thread(train, self.cluster)
        engines = self._engines()
        credential = (self.cluster.state / "credential").read_text().strip()
        trainer = self.cluster.gateway.plan.environment["PACELINE_GATEWAY_TRAINER"]
        sampler = self.cluster.gateway.plan.environment["PACELINE_GATEWAY_SAMPLERS"]
        unanswered: list[Case | HttpCase] = []
        async with (
            paceline.ServiceClient(self.cluster.address, key) as service,
            self._http(key) as edge,
            open_channel(self.cluster.address) as front,
            open_channel(trainer) as t,
            open_channel(sampler) as s,
        ):
            makers = await self._makers(edge, service)
            # The trainer imports what renders on first use, and keeps it: a quarter of a GiB.
            await asyncio.to_thread(service.render_conversations, [json.loads(CONVERSATION)])
            channels = _Channels(front, t, s, edge, tenant, key, credential)
            numbers = iter(range(first, first + cases))

            async def work() -> None:
                for number in numbers:
                    case = makers.make(number)
                    if not await self._send(channels, case, outcome):
                        unanswered.append(case)
                    if number % max(1, cases // 10) == 0:
                        outcome.memory.append(self.memory())

            following = asyncio.create_task(_follow(service, makers.runs))
            over = threading.Event()
            canary = asyncio.create_task(asyncio.to_thread(self._train_until, over, expected, outcome))
            try:
                await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
            finally:
                over.set()
                following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await canary
            await self._repeat(channels, unanswered, outcome)
            await _delete_runs(service)
            if cases >= ENOUGH_CASES and all_refused(outcome.accepted):
                makers = await self._makers(edge, service)
                await self._accept(channels, service, makers, range(first, first + cases), outcome)
                await _delete_runs(service)
        outcome.memory.append(self.memory())
        self._check_services(engines, outcome)
        return outcome

    def _train_until(self, over: threading.Event, expected: list[float], outcome: Outcome) -> None:
        """Train the canary's run again and again; note a failure when a result is not that of the run alone."""
        while not outcome.trained or not over.wait(_PAUSE_SECONDS):
            outcome.trained += 1
            try:
                found = train(self.cluster)
            except errors.PacelineError as error:
                outcome.failures.append(f"the canary failed: {error!r}")
                continue
            if found != expected:
                outcome.failures.append(f"the canary's results changed: {found}, alone {expected}")

    async def _send(self, channels: _Channels, case: Case | HttpCase, outcome: Outcome, *, alone: bool = False) -> bool:
        """Send a case; return whether it was answered in time."""
        if isinstance(case, HttpCase):
            return await self._request(channels.edge, case, outcome, _SECONDS_ALONE if alone else _HTTP_SECONDS)
        return await self._call(channels, case, outcome, _SECONDS_ALONE if alone else _SECONDS)

    async def _repeat(self, channels: _Channels, cases: list[Case | HttpCase], outcome: Outcome) -> None:
        """Repeat, one after the other, cases that were not answered in time; note a failure for one that hangs."""
        hanging, repeated = 0, Outcome(failures=outcome.failures)
        for case in cases:
            if isinstance(case, Case) and path_of(case.method) in _WAITS:
                continue
            if not await self._send(channels, case, repeated, alone=True):
                outcome.failures.append(f"not answered within {_SECONDS_ALONE:.0f} s: seed {self.seed} {case}")
                hanging += 1
            if hanging == _MAX_HANGING:
                return

    async def _accept(
        self,
        channels: _Channels,
        service: paceline.ServiceClient,
        makers: _Makers,
        numbers: range,
        outcome: Outcome,
    ) -> None:
        """Repeat cases of what accepted none, one after the other and about new runs, until it accepts one.

        Beside other cases a command may always be too late: its run has moved on, or a step has no gradient left.
        """
        repeated = Outcome(accepted=outcome.accepted, failures=outcome.failures)
        for number in numbers:
            if not (refused := all_refused(outcome.accepted)):
                return
            case = makers.make(number)
            name = case.route if isinstance(case, HttpCase) else path_of(case.method)
            if not name.startswith((*refused, *_GRADIENTS)):
                continue
            await _find(service, makers.runs)
            await self._send(channels, makers.make(number), repeated, alone=True)

    def _engines(self) -> dict[str, set[int]]:
        return {name: set(service.engines()) for name, service in self.cluster.services.items()}

    def _check_services(self, engines: dict[str, set[int]], outcome: Outcome) -> None:
        """Note a failure for a service or an engine that ended, and for an exception that nobody foresaw."""
        for name, service in self.cluster.services.items():
            if service.process.poll() is not None:
                outcome.failures.append(f"{name} ended:\n{service.tail()}")
            elif set(service.engines()) != engines[name]:
                outcome.failures.append(f"{name} has other engines than before:\n{service.tail()}")
            log = service.log.read_text(errors="replace")
            outcome.failures += [f"{name} logged {text!r}:\n{service.tail()}" for text in _ALARMS if text in log]

    def _http(self, key: str) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=32)
        session = aiohttp.ClientSession(connector=connector, headers={"X-API-Key": key})
        session._retry_connection = False  # else a GET whose connection the gateway drops is sent again unnoticed
        return session

    async def _makers(self, edge: aiohttp.ClientSession, service: paceline.ServiceClient) -> _Makers:
        """Make runs, and the makers of cases about them."""
        owned, http_owned = await _own(service), await self._http_own(edge, service)
        grpc_cases = CaseMaker(self.seed, owned, {name: await _own(service) for name in ENDS})
        spares = {route: await self._http_own(edge, service) for route in HTTP_ENDS}
        http_cases = HttpCaseMaker(self.seed, await http_routes(), http_owned, spares)
        return _Makers(grpc_cases, http_cases, (owned, http_owned.run))

    def _url(self, path: str) -> URL:
        address = self.cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
        return URL(f"http://{address}{path}", encoded=True)

    async def _http_own(self, edge: aiohttp.ClientSession, service: paceline.ServiceClient) -> HttpOwned:
        """Make a session, a model, a checkpoint and a sampler, and a session of MetaClaw's API."""

        async def post(route: str, /, **body: object) -> dict[str, str]:
            async with edge.post(self._url(route), json=body) as answer:
                return await answer.json()

        async def result(route: str, /, **body: object) -> dict[str, str]:
            future = await post(route, **body)
            while (found := await post(_RETRIEVE, request_id=future["request_id"])).get("type") == "try_again":
                pass
            return found

        before = {run.run_id for run in await service.list_runs_async()}
        session = (await post("/api/v1/create_session"))["session_id"]
        of_session = {"session_id": session, "base_model": "model"}
        made = await result("/api/v1/create_model", **of_session, model_seq_id=0, lora_config={"rank": 2})
        [run_id] = {run.run_id for run in await service.list_runs_async()} - before
        of_model = {"model_id": made["model_id"]}
        state = (await result("/api/v1/save_weights", **of_model, seq_id=1, path="a"))["path"]
        await result("/api/v1/save_weights_for_sampler", **of_model, seq_id=2, sampling_session_seq_id=1)
        sampler = await post("/api/v1/create_sampling_session", **of_session, sampling_session_seq_id=0)
        metaclaw = (await post("/v1/lora/create", rank=2))["session_id"]
        saved = await post("/v1/checkpoint/save", session_id=metaclaw, name="a")
        run = Owned(run_id, state, "", last_seq_id=2)
        return HttpOwned(session, made["model_id"], sampler["sampling_session_id"], metaclaw, saved["path"], run)

    async def _request(self, edge: aiohttp.ClientSession, case: HttpCase, outcome: Outcome, seconds: float) -> bool:
        """Send a request; return whether it was answered in time.

        A failure is an unexpected 5xx status, an error without an explanation in JSON, or a lost connection.
        """
        sent = edge.request(
            case.method,
            self._url(case.path),
            data=case.content or None,
            headers=case.headers,
            skip_auto_headers=["Content-Type"],
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(sock_connect=seconds, sock_read=seconds),
        )
        try:
            async with sent as answer:
                status, text = answer.status, await answer.text(errors="replace")
        except aiohttp.ServerTimeoutError:
            outcome.codes[f"HTTP {_UNANSWERED}"] += 1
            return False
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome.failures.append(f"http case {case.number}, {case.method} {case.path[:80]}: {error!r}")
            return True
        outcome.codes[f"HTTP {status}"] += 1
        future = _future(text) if status < 400 and case.method == "POST" and case.path != _CANCEL else None
        is_accepted = status < 400 if future is None else await self._succeeds(edge, case, future, outcome)
        outcome.accepted[case.route] += is_accepted
        is_known = status < 500 or status in {503, 504}
        if not is_known or (status >= 400 and "detail" not in text):
            text = f"{case.method} {case.path[:80]}: {status} {text[:200]}"
            outcome.failures.append(f"http case {case.number}, {text}")
        return True

    async def _succeeds(self, edge: aiohttp.ClientSession, case: HttpCase, future: str, outcome: Outcome) -> bool:
        """Return whether what a request began succeeds soon; note a failure of the server's."""
        try:
            async with edge.post(self._url(_RETRIEVE), json={"request_id": future}, timeout=_FUTURE_TIMEOUT) as answer:
                found = await answer.read()
        except TimeoutError:
            return False
        if found.startswith(b'{"error":') and b"INTERNAL" in found:
            outcome.failures.append(f"http case {case.number}, {case.method} {case.path[:80]}: {found[:300]!r}")
        return answer.status < 400 and not found.startswith((b'{"error":', b'{"type":"try_again"'))

    async def _call(self, channels: _Channels, case: Case, outcome: Outcome, seconds: float) -> bool:
        """Make a call; return whether it was answered in time."""
        channel, identity = channels.choose(case)
        metadata = [pair for pair in case.metadata if pair[0] not in dict(identity)] + list(identity)
        path, streams = path_of(case.method), case.method.server_streaming
        outcome.accepted[path] += 0
        if case.method.client_streaming or len(case.messages) != 1:
            call = channel.stream_stream(path)(_each(case.messages), metadata=metadata, timeout=seconds)
            answer = _drain(call)
        elif streams:
            call = channel.unary_stream(path)(case.messages[0], metadata=metadata, timeout=seconds)
            answer = _drain(call)
        else:
            call = channel.unary_unary(path)(case.messages[0], metadata=metadata, timeout=seconds)
            answer = _wait(call)
        if case.leaves:
            await asyncio.sleep(0)
            call.cancel()
        name = "OK"
        try:
            await answer
            outcome.accepted[path] += 1
        except asyncio.CancelledError:
            name = "left"
        except grpc.aio.AioRpcError as failure:
            code = failure.code()
            name = code.name
            untyped = is_from_grpc(failure)
            if untyped and code is grpc.StatusCode.DEADLINE_EXCEEDED:
                name = _UNANSWERED
            lost = untyped and code is grpc.StatusCode.UNAVAILABLE
            if code is grpc.StatusCode.INTERNAL and failure.details() == _CLIENT_GAVE_UP:
                name = "the client gave up"
            elif lost or code in _REFUSED:
                outcome.failures.append(f"{name} {failure.details()}: seed {self.seed} {case}")
        outcome.codes[name] += 1
        return name != _UNANSWERED

    def memory(self) -> int:
        """Return the resident bytes of the services and their children."""
        total = 0
        for service in self.cluster.services.values():
            parent = psutil.Process(service.process.pid)
            total += sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))
        return total


async def _follow(service: paceline.ServiceClient, runs: tuple[Owned, ...]) -> None:
    """Keep track of where the runs are, until cancelled."""
    while True:
        with suppress(errors.TimedOut, errors.Exhausted, errors.Unavailable):  # while the cases are too many
            await _find(service, runs)
        await asyncio.sleep(_FOLLOW_SECONDS)


async def _find(service: paceline.ServiceClient, runs: tuple[Owned, ...]) -> None:
    for owned in runs:
        run = await service.get_run_async(owned.run_id)
        owned.last_seq_id, owned.version = run.last_seq_id, max(1, run.latest_version)


async def _delete_runs(service: paceline.ServiceClient) -> None:
    for run in await service.list_runs_async():
        with suppress(errors.RunNotFound):
            await service.delete_run_async(run.run_id, delete_checkpoints=True)


async def _own(service: paceline.ServiceClient) -> Owned:
    """Make a run with checkpoints and a version."""
    training = await service.create_lora_training_client_async(rank=2)
    state = (await training.save_state("a")).path
    sampler = (await training.save_weights_for_sampler("a")).path
    await training.publish_weights()
    return Owned(training.run_id, state, sampler, last_seq_id=3)


def _future(text: str) -> str | None:
    """Return the id of the future that an answer names, or None."""
    answer = json.loads(text) if text.startswith("{") else None
    return answer.get("request_id") if isinstance(answer, dict) else None


def train(cluster: Cluster) -> list[float]:
    """Train a run of the canary and delete it; return the losses and the gradients' norms."""
    rng = np.random.default_rng(0)
    results = []
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        training = service.create_lora_training_client(rank=4, seed=3)
        for _ in range(_STEPS):
            tokens = rng.integers(256, size=33).astype(np.int64)
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(32, np.float32)}
            done = training.forward_backward([types.Datum(tokens[:-1].astype(np.int32), inputs)]).result()
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            results += [done.metrics["loss:sum"], stepped.grad_norm]
        service.delete_run(training.run_id)
    return results


def all_refused(accepted: Counter[str]) -> list[str]:
    """Return what has to accept some of ENOUGH_CASES calls, and accepted none: nothing behind it was reached."""
    called = [path_of(method) for method in methods() if method.name not in WITHOUT_VALID | {"CompleteText"}]
    called += [f"POST {route}" for route in valid_bodies(_NOTHING, 0, 0) if not _COMPLETES_TEXT.search(route)]
    never = [name for name in called if not accepted[name]]
    return never + [name for name in _REACHED if not any(accepted[key] for key in accepted if key.startswith(name))]


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

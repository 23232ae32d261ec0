"""Measure the cost of the HTTP port: Tinker's SDK against the gRPC client, in one run on the same services.

    make bench-http        python -m bench.http [--rounds 7] [--steps 24]

step: pipelined training steps (forward_backward and optim_step issued together) on the embedded model, by the SDK and
    by the gRPC client, each on its own run. sample: one sample of one token at a time, by each of them. heartbeat:
    heartbeats one at a time, while 2,048 futures wait behind a command that never arrives and 1,000 samples are in
    flight.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import tinker
from make_model import default_directory, make_model
from support.stacks.cluster import Cluster
from tinker import types

import paceline
from bench.budgets import budget
from paceline.client.futures import PacelineFuture

WAITING, SAMPLES, BEATS = 2048, 1000, 300
PROMPT = list(range(100, 132))


def main() -> None:
    """Measure both parts and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24, help="training steps, and samples, of an arm in a round")
    options = parser.parse_args()
    model = make_model(default_directory())
    with TemporaryDirectory() as directory:
        settings = {"PACELINE_GATEWAY_LOG_LEVEL": "ERROR", "PACELINE_SAMPLER_KV_CACHE_GIB": "2"}
        cluster = Cluster.make(Path(directory), Path(model), engine="vllm", **settings)
        with cluster.running():
            _compare(cluster, options.rounds, options.steps)
            _heartbeats(cluster)


def _compare(cluster: Cluster, rounds: int, count: int) -> None:
    """Time steps and samples of both clients, alternating."""
    sdk = tinker.ServiceClient(base_url=_address(cluster), api_key=f"tml-{cluster.api_key}")
    grpc = paceline.ServiceClient(cluster.address, cluster.api_key)
    name = grpc.get_server_capabilities().supported_models[0].model.name
    theirs = sdk.create_lora_training_client(base_model=name, rank=16, train_unembed=False).result()
    ours = grpc.create_lora_training_client(rank=16)
    their_sampler, our_sampler = sdk.create_sampling_client(base_model=name).result(), grpc.create_sampling_client()
    targets, weights = [*PROMPT[1:], 5], [1.0] * len(PROMPT)
    their_datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )
    our_datum = paceline.Datum(PROMPT, {"target_tokens": targets, "weights": weights})

    def their_steps() -> None:
        def step() -> tinker.APIFuture[types.OptimStepResponse]:
            theirs.forward_backward([their_datum] * 4, "cross_entropy")
            return theirs.optim_step(types.AdamParams(learning_rate=1e-5))

        [step() for _ in range(count)][-1].result()

    def our_steps() -> None:
        def step() -> PacelineFuture[paceline.OptimStepOutput]:
            ours.forward_backward([our_datum] * 4, "cross_entropy")
            return ours.optim_step(paceline.AdamParams(learning_rate=1e-5))

        [step() for _ in range(count)][-1].result()

    def their_samples() -> None:
        for _ in range(count):
            params = types.SamplingParams(max_tokens=1)
            their_sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result()

    def our_samples() -> None:
        for _ in range(count):
            our_sampler.sample(PROMPT, 1, paceline.SamplingParams(max_tokens=1)).result()

    arms = {
        "step, SDK": their_steps,
        "step, gRPC": our_steps,
        "sample, SDK": their_samples,
        "sample, gRPC": our_samples,
    }
    for arm in arms.values():
        arm()  # warm
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            seconds[name].append(_timed(arm) / count)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {1e3 * median:.2f} ms (from {1e3 * min(seconds[name]):.2f})")
    ratios = [a / b for a, b in zip(seconds["step, SDK"], seconds["step, gRPC"], strict=True)]
    budget("pipelined step, SDK by gRPC", statistics.median(ratios), 1.1, at_most=True)
    more = [1e3 * (a - b) for a, b in zip(seconds["sample, SDK"], seconds["sample, gRPC"], strict=True)]
    budget("sample, ms more than gRPC", statistics.median(more), 5.0, at_most=True)
    sdk.close("success").result()
    grpc.close()


def _timed(arm: Callable[[], None]) -> float:
    start = time.perf_counter()
    arm()
    return time.perf_counter() - start


def _heartbeats(cluster: Cluster) -> None:
    """Time heartbeats under load from another thread with its own connections."""
    base, headers = f"{_address(cluster)}/api/v1", {"X-API-Key": cluster.api_key}
    with httpx.Client(base_url=base, headers=headers, timeout=60) as client:
        session = client.post("/create_session", json={}).json()["session_id"]
        made = {"session_id": session, "model_seq_id": 0, "base_model": "", "lora_config": {"rank": 2}}
        future = client.post("/create_model", json=made).json()
        client.post("/retrieve_future", json=future)
        ready, over = threading.Event(), threading.Event()
        times = []
        with ThreadPoolExecutor(1) as threads:
            load = threads.submit(asyncio.run, _load(base, headers, session, future["model_id"], ready, over))
            ready.wait()
            for _ in range(BEATS):
                start = time.perf_counter()
                client.post("/session_heartbeat", json={"session_id": session}).raise_for_status()
                times.append(1e3 * (time.perf_counter() - start))
                time.sleep(0.01)
            over.set()
            load.result()
    times.sort()
    p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    print(f"heartbeat with {WAITING} futures waiting and {SAMPLES} samples in flight: p50 {p50:.2f}, p99 {p99:.2f} ms")
    budget("heartbeat under load, p99 ms", p99, 10.0, at_most=True)


async def _load(
    base: str, headers: dict[str, str], session: str, model_id: str, ready: threading.Event, over: threading.Event
) -> None:
    """Keep futures waiting and samples in flight until `over` is set. Raises AssertionError if a future ends before."""
    try:
        await _keep_busy(base, headers, session, model_id, ready, over)
    finally:
        ready.set()


async def _keep_busy(
    base: str, headers: dict[str, str], session: str, model_id: str, ready: threading.Event, over: threading.Event
) -> None:
    limits = httpx.Limits(max_connections=WAITING + SAMPLES + 64)
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=90, limits=limits) as client:
        sampler = await client.post(
            "/create_sampling_session", json={"session_id": session, "sampling_session_seq_id": 0, "base_model": "x"}
        )
        if sampler.is_error:
            name = (await client.get("/get_server_capabilities")).json()["supported_models"][0]["model_name"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": name}
            sampler = await client.post("/create_sampling_session", json=body)
        sampler_id = sampler.json()["sampling_session_id"]
        waits = []
        for seq_id in range(2, WAITING + 2):  # number 1 is never sent
            body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {}}
            posted = (await client.post("/optim_step", json=body)).raise_for_status().json()
            waits.append(asyncio.create_task(_poll(client, posted["request_id"])))
        for seq_id in range(SAMPLES):
            body = {
                "sampling_session_id": sampler_id,
                "seq_id": seq_id,
                "prompt": {"chunks": [{"tokens": PROMPT}]},
                "sampling_params": {"max_tokens": 256, "stop": []},
            }
            (await client.post("/asample", json=body)).raise_for_status()
        ready.set()
        await asyncio.to_thread(over.wait)
        assert not any(wait.done() for wait in waits), "a future ended while heartbeats were timed"
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await client.post(f"/sessions/{session}/finish", json={})


async def _poll(client: httpx.AsyncClient, request_id: str) -> None:
    """Ask for a result again and again until there is one."""
    waiting = httpx.codes.REQUEST_TIMEOUT
    while (answer := await client.post("/retrieve_future", json={"request_id": request_id})).status_code == waiting:
        pass
    answer.raise_for_status()


def _address(cluster: Cluster) -> str:
    return f"http://{cluster.gateway.plan.environment['PACELINE_GATEWAY_HTTP_LISTEN']}"


if __name__ == "__main__":
    main()

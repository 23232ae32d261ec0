"""Measure the goodput of a sampler with ten times as many clients as it admits.

    make bench-overload        python -m bench.sample.overload [--rounds 5] [--seconds 30] [--models tiny embedded]

The sampler service admits 64 completions (`max_waiting`), of which 32 run at a time. Clients work in closed loops: each
samples 32 tokens, again and again. Goodput is the tokens of completed samples per second. Three arms take turns:

peak: 64 clients, none of which is refused.
overload: 640 clients; a refused client waits as long as RetryInfo says, and up to half as long again at random.
overload, no waiting: 640 clients that retry 10 ms after a refusal.

On the embedded model, and on a tiny one whose steps cost so little that refusing is a large part of the work. The
sampler runs on the last core, the clients on the first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from make_model import default_directory, make_model
from support.models.tiny_models import make_tiny_llama

from bench.budgets import budget
from bench.device import Device
from bench.sample.servers import Place, serve_rpc
from paceline.codec import tensor_to_proto
from paceline.errors import Overloaded
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types.v1 import model_pb2, sampling_pb2

ADMITTED, RUNNING, TIMES, TOKENS, GOODPUT = 64, 32, 10, 32, 0.9
_REST_SECONDS = 1.0
"""Pause between two arms, in which abandoned samples end."""
PEAK, OVERLOAD, AT_ONCE = "peak", "overload", "overload, no waiting"


@dataclass
class Figures:
    """Measurements of one arm."""

    goodput: list[float] = field(default_factory=list)
    """Tokens per second of completed samples, by round."""
    waits: list[float] = field(default_factory=list)
    """Seconds from a sample's first attempt to its end."""
    samples: int = 0
    refusals: int = 0


Delay = Callable[[float], float]
"""Maps the seconds of RetryInfo to the seconds that a client waits."""


def as_told(seconds: float) -> float:
    """Return the wait that RetryInfo asks for, with jitter, which spreads clients that were refused together."""
    return seconds * random.uniform(1.0, 1.5)


ARMS: dict[str, tuple[int, Delay]] = {
    PEAK: (ADMITTED, as_told),
    OVERLOAD: (TIMES * ADMITTED, as_told),
    AT_ONCE: (TIMES * ADMITTED, lambda _: 0.01),
}


async def client(stub: Any, figures: Figures, delay: Delay, until: float) -> None:
    """Sample repeatedly; samples that end after `until` do not count."""
    prompt = tensor_to_proto(np.random.default_rng().integers(0, 200, 16, np.int32))
    params = sampling_pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    request = pb.SampleRequest(model=model_pb2.ModelRef(base=model_pb2.BaseModel()), prompt=prompt, params=params)
    began = time.perf_counter()
    while True:
        try:
            await stub.Sample(request)
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            if not isinstance(error, Overloaded):
                raise error from failure
            figures.refusals += 1
            await asyncio.sleep(delay(error.retry_after or 0.0))
            continue
        now = time.perf_counter()
        if now < until:
            figures.samples += 1
            figures.waits.append(now - began)
        began = now


async def one_round(stub: Any, arm: str, seconds: float, figures: Figures) -> None:
    """Start an arm's clients; count after they have settled."""
    count, delay = ARMS[arm]
    settle = seconds / 5
    own = Figures()
    until = time.perf_counter() + settle + seconds
    tasks = [asyncio.create_task(client(stub, own, delay, until)) for _ in range(count)]
    await asyncio.sleep(settle)
    before = own.samples
    done, _ = await asyncio.wait(tasks, timeout=max(0.0, until - time.perf_counter()), return_when="FIRST_EXCEPTION")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    figures.goodput.append((own.samples - before) * TOKENS / seconds)
    figures.waits += own.waits
    figures.samples += own.samples
    figures.refusals += own.refusals


async def measure(place: Place, rounds: int, seconds: float) -> dict[str, Figures]:
    """Alternate the arms; the first round does not count."""
    figures = {arm: Figures() for arm in ARMS}
    settings = {"max_waiting": str(ADMITTED), "max_num_seqs": str(RUNNING), "log_level": "INFO"}
    async with serve_rpc(place, DEVNULL, **settings) as server:
        for number in range(rounds + 1):
            for arm in ARMS:
                await one_round(server.stub, arm, seconds, figures[arm] if number else Figures())
                await asyncio.sleep(_REST_SECONDS)
            print(f"round {number} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    return figures


def report(model: str, figures: dict[str, Figures]) -> None:
    """Print the table and the budget."""
    print(f"\n{model} model, {ADMITTED} completions admitted")
    print(f"{'arm':24}{'clients':>8}{'tok/s median':>14}{'lowest':>9}{'refused':>9}{'sample p50 s':>14}{'p99':>8}")
    for arm, one in figures.items():
        share = one.refusals / (one.refusals + one.samples)
        print(f"{arm:24}{ARMS[arm][0]:8}{np.median(one.goodput):14.0f}{min(one.goodput):9.0f}{share:9.1%}"
              f"{np.median(one.waits):14.2f}{np.percentile(one.waits, 99):8.2f}")  # fmt: skip
    ratio = float(np.median(figures[OVERLOAD].goodput) / np.median(figures[PEAK].goodput))
    budget(f"goodput at {TIMES} times overload over peak, {model} model", ratio, GOODPUT)


def main() -> None:
    """Measure one model after the other."""
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round")
    parser.add_argument("--models", nargs="+", choices=("tiny", "embedded"), default=("tiny", "embedded"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {cores[0]})
    with TemporaryDirectory() as scratch, suppress(KeyboardInterrupt):
        for name in options.models:
            model = make_tiny_llama(Path(scratch) / name) if name == "tiny" else make_model(default_directory())
            place = Place(model, "auto", Device("cpu", cores[-1:]))
            report(name, asyncio.run(measure(place, options.rounds, options.seconds)))


if __name__ == "__main__":
    main()

"""Measure how long publishing takes, from the optimizer step's reply, while the sampler decodes 8 streams.

    make bench-publish        python -m bench.publish [--rounds 5] [--publishes 4] [--arms stream collective]
                              [--device cuda] [--model llama-3b] [--rank 32]

Our arms: the trainer and the sampler service, with the bridges `stream`, `volume`, `collective` and `shared`. The other
arm does what simple trainers do: PEFT's save_pretrained to disk (or, with `--arms "PEFT, memory"`, to memory that both
processes share), then load_lora_adapter over HTTP at vLLM's own server.
Two figures each: until the version is active (acknowledged) and until its first token has arrived. On a CPU the model
is the embedded one in float32; the adapter has rank 32 on every linear module: 39 MB.

Two more arms publish whole models of a full-parameter run, once a round: `in place` broadcasts them (bridge
`collective`) and writes them over vLLM's weights, `restart` rebuilds the engine. Streams in progress end first, so the
figures of these arms include the rest of a stream, as the wait for the step. These arms have no budget.

Trainers and this process run on the first core, samplers on the last. All are started first; then the arms take turns,
a round at a time: only the arm that is measured has streams, the others sleep. Each takes 3 to 5 GB; use `--arms` to
run fewer.

On a GPU the model is random, in bfloat16, of Llama 3.1 8B's shape: the adapter has 168 MB. All arms share one GPU, by
default `stream` and the other arm. Each takes twice the weights and 12 GB, too much for 80 GB: use --model llama-3b
there. `--model qwen2.5-7b --arms stream "PEFT, HTTP" "PEFT, memory"` compares as vLLM's issue 48297 does. The limits of
milliseconds are those of a CPU and its adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Protocol

import numpy as np

from bench.budgets import budget, p99
from bench.device import Device, add_device_options
from bench.publish.ours import ADAPTER_WAYS, MODEL_WAYS, Ours
from bench.publish.stock import Stock
from bench.publish.times import RANK, Place, Times
from bench.random_models import SHAPES, find_model

OTHER = "PEFT, HTTP"
IN_MEMORY = "PEFT, memory"
STOCK_ARMS = {OTHER: None, IN_MEMORY: Path("/dev/shm")}
"""The other arm by the place of its files: the disk, or memory that both processes share."""
STREAMS = 8
ACTIVE_FASTER, FIRST_FASTER = 4.0, 2.5
P50_MILLISECONDS, P99_MILLISECONDS = 20.0, 40.0
APPLY_OVER_MEMCPY = 1.5
_SETTLE_SECONDS = 0.3


class Arm(Protocol):
    """A trainer with a sampler."""

    def stream(self) -> AsyncIterator[int]:
        """Sample one completion under the newest version; yield the number of tokens of each message."""
        ...

    async def publish(self) -> Times:
        """Take an optimizer step, publish, and sample a token of the new version."""
        ...


@dataclass
class Figures:
    """Measurements of one arm."""

    times: list[Times] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def of(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return one figure of every publish, in milliseconds."""
        return np.array([getattr(times, name) for times in self.times], np.float64)


@asynccontextmanager
async def decoding(arm: Arm, figures: Figures) -> AsyncIterator[None]:
    """Keep the sampler busy with streams until the block ends."""

    async def again() -> None:
        while True:
            async for tokens in arm.stream():
                figures.tokens += tokens

    start, tasks = time.perf_counter(), [asyncio.create_task(again()) for _ in range(STREAMS)]
    try:
        await asyncio.sleep(2 * _SETTLE_SECONDS)
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        figures.seconds += time.perf_counter() - start


async def one_round(arm: Arm, publishes: int, figures: Figures) -> None:
    """Publish several times while the arm's sampler decodes."""
    async with decoding(arm, figures):
        for _ in range(publishes):
            figures.times.append(await arm.publish())
            await asyncio.sleep(_SETTLE_SECONDS)


def memcpy_milliseconds(size: int, core: int, rounds: int = 15) -> float:
    """Return the median time to copy `size` bytes from a freshly mapped file in memory to warm memory, on a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    into, seconds = np.zeros(size, np.uint8), []
    with NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(np.random.default_rng(0).bytes(size))
        file.flush()
        for _ in range(rounds):
            start = time.perf_counter()
            with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
                into[:] = np.frombuffer(mapped, np.uint8)
            seconds.append(time.perf_counter() - start)
    os.sched_setaffinity(0, before)
    return 1e3 * float(np.median(seconds))


def report(figures: Mapping[str, Figures], sizes: Mapping[str, int], memcpy: float | None) -> None:
    """Print the table and the budgets; without the time of a memcpy those alone that hold on every device."""
    adapters = {arm: one for arm, one in figures.items() if arm not in MODEL_WAYS}
    for arm, size in sizes.items():
        print(f"{arm}: versions of {size / 1e6:.1f} MB")
    print(f"\n{STREAMS} streams; milliseconds from the optimizer step's reply")
    print(f"{'arm':12}{'publishes':>10}{'tok/s':>7}{'active p50':>12}{'p99':>8}{'less wait':>11}{'p99':>8}"
          f"{'first p50':>11}{'p99':>8}{'step wait':>11}{'apply':>9}{'staged':>8}")  # fmt: skip
    for arm, one in figures.items():
        active, own, first = one.of("active"), one.of("active") - one.of("step_wait"), one.of("first")
        print(f"{arm:12}{len(one.times):10}{one.tokens / one.seconds:7.0f}{np.median(active):12.1f}{p99(active):8.1f}"
              f"{np.median(own):11.1f}{p99(own):8.1f}{np.median(first):11.1f}{p99(first):8.1f}"
              f"{np.median(one.of('step_wait')):11.1f}{np.median(one.of('apply')):9.1f}"
              f"{np.median(one.of('staged')):8.1f}")  # fmt: skip
    for arm in STOCK_ARMS.keys() & figures.keys():
        print(f"{arm}: vLLM's load alone, p50: {np.median(figures[arm].of('apply')):.1f} ms")
    if adapters and memcpy is not None:
        print(f"memcpy of an adapter's bytes: {memcpy:.2f} ms")
    for arm in (arm for arm in adapters if arm not in STOCK_ARMS):
        one, own = figures[arm], figures[arm].of("active") - figures[arm].of("step_wait")
        print(f"{arm} apply, p50: {np.median(one.of('apply')):.1f} ms")
        if OTHER in figures:
            other = figures[OTHER]
            budget(f"{arm} active, times faster", ratio(other, one, "active"), ACTIVE_FASTER)
            budget(f"{arm} first token, times faster", ratio(other, one, "first"), FIRST_FASTER)
        if memcpy is None:
            continue
        budget(f"{arm} active less step wait, p50 ms", float(np.median(own)), P50_MILLISECONDS, at_most=True)
        budget(f"{arm} active less step wait, p99 ms", p99(own), P99_MILLISECONDS, at_most=True)
        apply = float(np.median(one.of("apply"))) / memcpy
        budget(f"{arm} apply over memcpy", apply, APPLY_OVER_MEMCPY, at_most=True)


def ratio(other: Figures, ours: Figures, name: str) -> float:
    """Return how many times faster we are at the median."""
    return float(np.median(other.of(name)) / np.median(ours.of(name)))


async def measure(
    arms: Sequence[str], place: Place, scratch: Path, rounds: int, publishes: int, apply: str
) -> tuple[dict[str, Figures], dict[str, int]]:
    """Start every arm, then alternate them; the first round warms up. Return the figures and the sizes of versions."""
    async with AsyncExitStack() as stack:
        started: dict[str, Arm] = {}
        for number, arm in enumerate(arms):
            address = f"127.0.0.1:{50500 + 10 * number}"
            if arm in STOCK_ARMS:
                files = stack.enter_context(TemporaryDirectory(dir=STOCK_ARMS[arm]))
                started[arm] = await stack.enter_async_context(Stock.start(place, Path(files) / "stock", address))
            else:
                way = (ADAPTER_WAYS | MODEL_WAYS)[arm]
                ours = Ours.start(place, scratch / arm.replace(" ", "-"), address, way=way, apply=apply)
                started[arm] = await stack.enter_async_context(ours)
            print(f"{arm} is up", flush=True)
        figures = {arm: Figures() for arm in arms}
        for number in range(rounds + 1):
            for arm in arms:
                times = 1 if arm in MODEL_WAYS else publishes
                await one_round(started[arm], times, figures[arm] if number else Figures())
            print(f"round {number} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
        sizes = {arm: one.size for arm, one in started.items() if isinstance(one, Ours)}
    return figures, sizes


def main() -> None:
    """Measure every arm in one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--publishes", type=int, default=4, help="in each arm's turn")
    every = [*ADAPTER_WAYS, *STOCK_ARMS, *MODEL_WAYS]
    parser.add_argument("--arms", nargs="+", choices=every, help="by default all on a CPU, two on a GPU")
    parser.add_argument(
        "--apply", default="direct", choices=["direct", "stock"], help="how our sampler loads a version"
    )
    add_device_options(parser)
    parser.add_argument("--model", help=f"a directory, or one of {', '.join(SHAPES)}, with random weights")
    parser.add_argument("--rank", type=int, default=RANK, help="of the adapter")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    device = Device.chosen(options, cores)
    arms = options.arms or (["stream", OTHER] if device.is_gpu else [arm for arm in every if arm != IN_MEMORY])
    with suppress(KeyboardInterrupt), TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = find_model(options.model or ("llama-8b" if device.is_gpu else "embedded"), scratch)
        device.pin(cores[0])
        place = Place(model, options.rank, device)
        figures, sizes = asyncio.run(measure(arms, place, scratch, options.rounds, options.publishes, options.apply))
        adapter = next((size for arm, size in sizes.items() if arm in ADAPTER_WAYS), 1)
        report(figures, sizes, None if device.is_gpu else memcpy_milliseconds(adapter, cores[-1]))


if __name__ == "__main__":
    main()

"""Paceline's arm of `python -m bench.soak`: four runs, published repeatedly to one sampler that decodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Self

import grpc

from bench.publish.ours import ADAPTER_WAYS, Ours, services
from bench.publish.times import STREAM_TOKENS
from bench.soak.score import Sampled
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types.v1 import sampling_pb2
from paceline.up.plan import UpOptions
from paceline.weights import read_manifest

RUNS, RANK = 4, 16
SLOTS = 20
"""One per stream, since a stream finishes on the version that it started with, plus one for each run's next version."""
PUBLISHES_A_STEP = 3
"""Publishes per training step: a step takes longer than the interval between versions, so some versions are equal."""


class Run(Ours):
    """One of the runs."""

    async def publish_alone(self) -> None:
        """Publish the current weights and wait until the sampler has the version."""
        reply = await self._call("PublishWeights", trainer_pb.PublishWeightsRequest, wait_for=trainer_pb.ACK_POLICY_ANY)
        self._version = reply.model.version

    async def sequence(self) -> Sampled | None:
        """Sample one sequence; return None if it was aborted. Raises RuntimeError if its tokens are of two versions."""
        tokens, logprobs, versions, stop = list[int](), list[float](), set[int](), 0
        try:
            async for part in self.sample(STREAM_TOKENS):
                tokens += part.tokens
                logprobs += part.logprobs
                versions.add(part.model.version)
                stop = part.stop_reason
        except grpc.aio.AioRpcError:
            return None
        if stop != sampling_pb2.STOP_REASON_LENGTH or len(tokens) != STREAM_TOKENS:
            return None
        if len(versions) != 1:
            raise RuntimeError(f"one sequence has tokens of versions {versions}")
        return Sampled(self.run_id, versions.pop(), tokens, logprobs)

    def directory(self, version: int) -> Path:
        """Return a version's directory on the volume."""
        return self._versions / self.run_id / "versions" / str(version)


class Soak:
    """The services and their runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {run.run_id: run for run in runs}
        self._turns = cycle(runs)
        self.aborted = 0

    @classmethod
    @asynccontextmanager
    async def start(cls, model: Path, state: Path, cores: Sequence[int], dtype: str) -> AsyncIterator[Self]:
        """Run the services and publish one version of each run. Every version stays on the volume."""
        options = UpOptions(str(model), address="127.0.0.1:50580", dtype=dtype, max_lora_rank=RANK)
        settings = {"PACELINE_TRAINER_KEEP_VERSIONS": "1000000", "PACELINE_SAMPLER_MAX_ACTIVE_VERSIONS": str(SLOTS),
                    "PACELINE_SAMPLER_MAX_LOADED_VERSIONS": str(2 * SLOTS)}  # fmt: skip
        async with services(options, state, cores, **settings) as (trainer, sampler):
            runs = [Run(trainer, sampler, state, ADAPTER_WAYS["stream"]) for _ in range(RUNS)]
            for run in runs:
                await run.create(RANK)
            yield cls(runs)

    def find(self, run_id: str, version: int) -> Path:
        """Return a version's directory."""
        return self._runs[run_id].directory(version)

    def distinct(self, run_id: str) -> list[Path]:
        """Return a run's versions on the volume, oldest first; of versions with the same weights only one."""
        every = sorted(self.find(run_id, 0).parent.glob("[0-9]*"), key=lambda path: int(path.name), reverse=True)
        first = {read_manifest(path).model.blake3: path for path in every}
        return list(first.values())[::-1]

    async def decode(self, streams: int, until: float) -> list[Sampled]:
        """Keep `streams` sequences running until a time of `time.perf_counter`; return those that ended."""
        found: list[Sampled] = []

        async def again() -> None:
            while time.perf_counter() < until:
                sequence = await next(self._turns).sequence()
                if sequence is None:
                    self.aborted += 1
                else:
                    found.append(sequence)

        await asyncio.gather(*(again() for _ in range(streams)))
        return found

    async def train(self, a_second: float, until: float, *, publishing: bool) -> int:
        """Publish the runs in turn, `a_second` in all or as often as they can; return the number of turns.

        Each run takes a training step before every third of its turns, with publishing and without.
        """
        counts = await asyncio.gather(
            *(self._train(run, a_second / RUNS, until, publishing=publishing) for run in self._runs.values())
        )
        return sum(counts)

    async def _train(self, run: Run, a_second: float, until: float, *, publishing: bool) -> int:
        done, due = 0, time.perf_counter()
        while time.perf_counter() < until:
            if done % PUBLISHES_A_STEP == 0:
                await run.step()
            if publishing:
                await run.publish_alone()
            done, due = done + 1, max(due + 1 / a_second, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
        return done

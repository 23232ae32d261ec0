"""Load on a sampler: streams that start together, and their timing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

MAX_MODEL_LEN, RANK, MAX_NUM_SEQS, KV_CACHE_GIB, BLOCK_SIZE = 512, 16, 64, 1, 32
"""Settings of every arm's engine; the block size is the one that the service sets on a CPU."""

OpenStream = Callable[[list[int]], AsyncIterator[int]]
"""Sends a prompt; yields once per message the number of its tokens, or only at the last message their sum."""


@dataclass(frozen=True)
class Load:
    """The streams of one round."""

    streams: int
    prompt_tokens: int
    tokens: int
    """Tokens that each stream samples; none ends earlier."""
    seed: int
    """Seed of the prompts, so that no round finds the prompts of another in a cache."""
    vocab_size: int
    adapter: bool = False
    """Whether the streams use the adapter."""

    def prompts(self) -> list[list[int]]:
        """Draw the prompts."""
        drawn = np.random.default_rng(self.seed).integers(0, self.vocab_size, (self.streams, self.prompt_tokens))
        rows: list[list[int]] = drawn.tolist()
        return rows


@dataclass(frozen=True)
class Timing:
    """The times of a round, in seconds."""

    seconds: float
    """From the first request to the last token; or processor time."""
    firsts: list[float]
    """From the first request to the first token of each stream."""
    tokens: int

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Arm(Protocol):
    """A server or an engine that serves streams."""

    pid: int
    """Id of its process; descendants of that process belong to the arm."""

    async def run(self, load: Load) -> Timing:
        """Serve a round."""
        ...


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and its descendants have used."""
    ticks, members = 0, [pid]
    while members:
        process = Path(f"/proc/{members.pop()}")
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
        for children in (process / "task").glob("*/children"):
            members += map(int, children.read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


async def run_load(load: Load, open_stream: OpenStream) -> Timing:
    """Read all streams of a round to their end. Raises RuntimeError if tokens are missing."""
    prompts = load.prompts()
    start = time.perf_counter()

    async def follow(prompt: list[int]) -> tuple[float, int]:
        first, tokens = 0.0, 0
        async for count in open_stream(prompt):
            first = first or time.perf_counter() - start
            tokens += count
        return first, tokens

    ends = await asyncio.gather(*map(follow, prompts))
    timing = Timing(time.perf_counter() - start, [first for first, _ in ends], sum(tokens for _, tokens in ends))
    if timing.tokens != load.streams * load.tokens:
        raise RuntimeError(f"{timing.tokens} tokens came, not {load.streams * load.tokens}")
    return timing

"""What the arms of `python -m bench.publish` have in common: settings, times, and how a server process runs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.device import MAX_BATCHED_TOKENS, Device

RANK = 32
PROMPT = list(range(1000, 1016))
STREAM_TOKENS = 48
LEARNING_RATE = 1e-4
_MAX_MODEL_LEN = 2048
"""Longest sequence of every arm: vLLM's KV cache must be large enough for one, and models' own limits are large."""


@dataclass(frozen=True)
class Place:
    """What every arm works with, and where."""

    model: Path
    rank: int
    device: Device

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device.is_gpu else "float32"

    @property
    def engine_settings(self) -> dict[str, object]:
        """Settings of vLLM in every arm."""
        return {"max_model_len": _MAX_MODEL_LEN, **self.device.engine_settings(self.model)}

    @property
    def server_settings(self) -> dict[str, object]:
        """The same for vLLM's server, and what the sampler service sets itself."""
        on_gpu: dict[str, object] = {"max_num_batched_tokens": MAX_BATCHED_TOKENS}
        return {**self.engine_settings, **(on_gpu if self.device.is_gpu else CPU_SERVER_SETTINGS)}


CPU_SERVER_SETTINGS: dict[str, object] = {"block_size": 32}
"""Settings of vLLM's server that make it work as the sampler service does on a CPU."""


@dataclass(frozen=True)
class Times:
    """Milliseconds from the optimizer step's reply."""

    active: float
    first: float
    step_wait: float = 0.0
    """Time that the sampler waited for its running step; 0 if the arm does not report it."""
    apply: float = 0.0
    """Time that the sampler loaded: ours as it reports it, vLLM's server from the request to the answer."""
    staged: float = 0.0


@contextmanager
def running(
    command: Sequence[str], cores: set[int], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends, on some cores; empty means all."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env={**own, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

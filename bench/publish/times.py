"""The times of one publish in `python -m bench.publish`, and a helper that runs a server process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RANK = 32
PROMPT = list(range(1000, 1016))
STREAM_TOKENS = 48
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Times:
    """Milliseconds from the optimizer step's reply."""

    active: float
    first: float
    step_wait: float = 0.0
    """Time that the sampler waited for its running step; 0 if the arm does not report it."""
    apply: float = 0.0
    staged: float = 0.0


@contextmanager
def running(
    command: Sequence[str], cores: set[int], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server on some cores until the block ends."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env={**own, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
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

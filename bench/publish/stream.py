"""Measure the speed of streaming versions over gRPC, against the same stream as message objects.

    make bench-stream        python -m bench.publish.stream [--rounds 7] [--mib 512]

Each arm (stream_arm.py) consists of two processes on two cores: one serves a file that is in memory, the other reads it
over loopback and verifies every chunk. The arms take turns. A last round, which is not timed, counts memory: the peak
of Python's objects, in chunks. Resident memory is shown beside it, relative to the process before its first stream: it
also includes gRPC's own buffers, and freed blocks that the C library keeps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.budgets import budget
from paceline.weights.wire import CHUNK_BYTES

ARMS = ("plain", "ours", "staged")


@dataclass
class Arm:
    """An arm's processes, server and reader, and their measurements."""

    ends: tuple[subprocess.Popen[str], subprocess.Popen[str]]
    base: list[int] = field(default_factory=list)
    """Resident bytes before the first stream."""
    resident: list[int] = field(default_factory=list)
    """Peak resident bytes above `base`."""
    objects: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def stream(self) -> float:
        """Stream the file once; return the seconds."""
        return float(ask(self.ends[1], "measure\n"))

    def count_memory(self) -> None:
        """Stream once more and count the memory of Python's objects."""
        self.resident = [status(end.pid, "VmHWM:") - base for end, base in zip(self.ends, self.base, strict=True)]
        before = [int(ask(end, "trace\n")) for end in self.ends]
        self.stream()
        self.objects = [int(ask(end, "trace\n")) - base for end, base in zip(self.ends, before, strict=True)]


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    """Send a line to a process and return the line that it answers."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process has no pipes")
    process.stdin.write(line)
    process.stdin.flush()
    if not (answer := process.stdout.readline()):
        raise RuntimeError("an arm's process ended")
    return answer.strip()


def status(pid: int, what: str) -> int:
    """Return a figure of /proc/<pid>/status in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run one end of an arm."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.publish.stream_arm", *words], stdin=pipe, stdout=pipe, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start(name: str, file: Path, cores: list[int], stack: ExitStack) -> Arm:
    """Start an arm's processes."""
    server = stack.enter_context(running("serve", name, str(cores[0]), str(file)))
    reader = stack.enter_context(running("read", name, str(cores[1]), str(file), ask(server)))
    ask(reader)
    return Arm((server, reader), [status(end.pid, "VmRSS:") for end in (server, reader)])


def report(arms: Mapping[str, Arm], size: int) -> None:
    """Print every arm's figures, then the budgets."""
    speeds = {name: size / 1e9 / np.array(arm.seconds) for name, arm in arms.items()}
    print(f"{'':10}{'GB/s':>15}{'chunks in objects':>24}{'resident, in chunks':>24}")
    print(f"{'arm':10}{'median':>9}{'p1':>6}" + 2 * f"{'server':>16}{'reader':>8}")
    for name, arm in arms.items():
        low, median = np.percentile(speeds[name], (1, 50))
        memory = [count / CHUNK_BYTES for count in arm.objects + arm.resident]
        print("{:10}{:9.2f}{:6.2f}{:16.1f}{:8.1f}{:16.1f}{:8.1f}".format(name, median, low, *memory))
    budget("weight stream, GB/s", float(np.median(speeds["ours"])), 1.2)
    budget("weight stream over plain protobuf", float(np.median(speeds["ours"] / speeds["plain"])), 1.7)
    chunks = round(max(arms["ours"].objects) / CHUNK_BYTES, 1)
    budget("weight stream, chunks in memory at a time", chunks, 2.0, at_most=True)


def main() -> None:
    """Run all arms and report."""
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=512, help="size of the file")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the file lies")
    parser.add_argument("--cores", nargs=2, type=int, default=[cores[0], cores[-1]], help="of the server, the reader")
    chosen = parser.parse_args()
    size = chosen.mib << 20
    with TemporaryDirectory(dir=chosen.folder) as folder, ExitStack() as stack:
        file = Path(folder) / "weights"
        file.write_bytes(np.random.default_rng(0).bytes(size))
        arms = {name: start(name, file, chosen.cores, stack) for name in ARMS}
        for number in range(chosen.rounds + 1):  # the first is a warm-up
            for arm in arms.values():
                arm.seconds.append(arm.stream())
                del arm.seconds[: number == 0]
        for arm in arms.values():
            arm.count_memory()
        report(arms, size)


if __name__ == "__main__":
    main()

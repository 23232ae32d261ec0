"""The ranks of an engine: processes with a device each, which execute the same requests in the same order.

Rank 0 holds the pipe to the service. Ranks exchange numbers and bytes, never pickled objects.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from paceline.errors import OutOfMemory, Unsupported
from trainer_service.engine_link import messages
from trainer_service.engine_link.watchdog import heartbeat_file, write_heartbeat

_TIMEOUT = timedelta(minutes=15)
"""How long a rank waits for the others. The launcher notices a dead rank long before."""
_WATCH_MILLISECONDS = 500

T = TypeVar("T")


class OutOfStepError(BaseException):
    """A rank diverged from the others. Their runs may differ, so the engine must restart.

    Not an Exception, so that nothing treats it as a failed command: the others may wait in a collective.
    """


@contextmanager
def in_step() -> Iterator[None]:
    """Run a collective; raise OutOfStepError if it fails, because other ranks may have completed it."""
    try:
        yield
    except Exception as error:
        raise OutOfStepError(f"a collective failed: {error}") from error


@contextmanager
def convert_memory_errors() -> Iterator[None]:
    """Raise OutOfMemory for every error by which torch reports a failed allocation."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # The CPU allocator raises a plain RuntimeError.
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            raise OutOfMemory("the engine ran out of memory; send fewer or shorter sequences.") from error
        raise


class Ranks:
    """This process among those that make up the engine; a single one needs no process group and no agreement."""

    def __init__(self, rank: int, size: int, heartbeat: Path | None = None) -> None:
        """Write the process id to `heartbeat`, the heartbeat file of this rank, if the service watches one."""
        self.rank = rank
        self.size = size
        self.leads = rank == 0
        """Whether this rank holds the pipe to the service."""
        self._heartbeat = heartbeat
        if heartbeat is not None:
            write_heartbeat(heartbeat, os.getpid())

    @classmethod
    def alone(cls) -> Ranks:
        """Return the only rank of an engine."""
        return cls(0, 1)

    @classmethod
    def join(cls, store: Path) -> Ranks:
        """Join the other ranks that torch's elastic launcher started, through the file `store`."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
        shared = FileStore(str(store), size)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=_TIMEOUT)
        return cls(rank, size, heartbeat_file(store.parent, rank))

    def beat(self) -> None:
        """Touch the heartbeat file. Raises OSError if the service has removed its directory."""
        if self._heartbeat is not None:
            self._heartbeat.touch()

    def claim_device(self, device: str) -> str:
        """Claim this rank's own device of the kind `device`, a GPU or a share of the CPU's cores; return its name.

        Raises Unsupported if there are fewer GPUs than ranks.
        """
        if self.size == 1:
            return device
        if device.startswith("cuda"):
            if torch.cuda.device_count() < self.size:
                raise Unsupported(f"{self.size} ranks need a GPU each; set ranks to the number of GPUs.", field="ranks")
            torch.cuda.set_device(self.rank)
            return f"cuda:{self.rank}"
        if sys.platform == "linux":
            cores = sorted(os.sched_getaffinity(0))
            own = cores[self.rank * len(cores) // self.size : (self.rank + 1) * len(cores) // self.size]
            os.sched_setaffinity(0, own or cores)
        return device

    def share(self, payload: bytes, source: int = 0) -> bytes:
        """Return the payload of rank `source`; the others' payloads are ignored."""
        if self.size == 1:
            return payload
        with in_step():
            length = torch.tensor(len(payload))
            dist.broadcast(length, source)
            content = _as_tensor(payload) if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
            if content.numel():
                dist.broadcast(content, source)
            return content.numpy().tobytes()

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of each of several ranks, by rank."""
        with in_step():
            lengths = [torch.tensor(0) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor(len(payload)))
            longest = max(int(length) for length in lengths)
            padded = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
            dist.all_gather(padded, _as_tensor(payload.ljust(longest)))
        return [content[: int(n)].numpy().tobytes() for content, n in zip(padded, lengths, strict=True)]

    def total(self, tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
        """Sum float32 tensors over the ranks, to the same bits on each; None means zeros of the shape in `like`."""
        pairs = list(zip(tensors, like, strict=True))
        flat = self.together(
            lambda: torch.cat([(torch.zeros_like(shape) if own is None else own).reshape(-1) for own, shape in pairs])
        )
        with in_step():
            dist.all_reduce(flat)
        parts = torch.split(flat, [shape.numel() for shape in like])
        return [part.view_as(shape) for part, shape in zip(parts, like, strict=True)]

    def together(self, work: Callable[[], T], catch_up: Callable[[], None] | None = None) -> T:
        """Run `work` on every rank and raise on all of them what it raised on any.

        If `work` runs collectives, `catch_up` completes those that this rank skipped when it raised. Raises
        OutOfStepError if it cannot.
        """
        if self.size == 1:
            return work()
        result: list[T] = []
        failure = None
        try:
            result.append(work())
        except Exception as error:  # Whatever the error is, the others wait for this rank.
            failure = messages.failure_of(error, "a rank's part")
        if failure is not None and catch_up is not None:
            gc.collect()  # Torch's frames are in reference cycles and hold what the part had allocated.
            catch_up()
        agreed = self._first(failure)
        if agreed is not None:
            raise agreed.error()
        return result[0]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` on one rank after another and raise on all of them what it raised on any."""
        results = [self.together(work if turn == self.rank else _nothing) for turn in range(self.size)]
        return cast("T", results[self.rank])

    def check_same_outcome(self, outcome: str) -> None:
        """Check that a command had the same outcome on each of several ranks. Raises OutOfStepError."""
        outcomes = {payload.decode() for payload in self.gather(outcome.encode())}
        if len(outcomes) > 1:
            raise OutOfStepError(f"ranks disagree: {', '.join(sorted(outcomes))}")

    def _first(self, failure: messages.Failure | None) -> messages.Failure | None:
        """Return the failure of the lowest rank that has one; None if no rank failed."""
        with in_step():
            lowest = torch.tensor(self.size if failure is None else self.rank)
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
        if lowest == self.size:
            return None
        return messages.decode(self.share(messages.encode(failure), int(lowest)), messages.Failure)


def exit_with(descriptor: int) -> None:
    """Exit within a second after the service, at the other end of `descriptor`, or the launcher has ended."""
    threading.Thread(target=_watch, args=(descriptor, os.getppid()), daemon=True).start()


def _watch(descriptor: int, launcher: int) -> NoReturn:
    poll = select.poll()
    poll.register(descriptor, 0)  # Hang-ups are always reported; the data is for rank 0 to read.
    while os.getppid() == launcher and not poll.poll(_WATCH_MILLISECONDS):
        pass
    os._exit(0)


def _nothing() -> None:
    pass


def _as_tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)

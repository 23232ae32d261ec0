"""The program of a group member, run as `python -m paceline.collective.member PLACE`. It imports torch.

PLACE is a GroupMembership as JSON. Standard input is a socket to the service: jobs arrive there as lines of JSON, and
events are written there in the same way. The process ends when its input does.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.collective.process import GroupMembership

CHUNK_BYTES = 16 << 20
"""Bytes in one broadcast."""

_JOIN_TIMEOUT = timedelta(seconds=120)
_SIOCGIFADDR = 0x8915


@dataclass
class MissingRanksError(Exception):
    """Some members did not join in time."""

    ranks: Sequence[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)} did not join"


@dataclass
class SharedGpuError(MissingRanksError):
    """Members share a GPU, but NCCL allows only one member per GPU."""

    def __str__(self) -> str:
        return (
            f"ranks {list(self.ranks)} use a GPU that another member has, which NCCL does not allow; give trainer and "
            "samplers GPUs of their own with CUDA_VISIBLE_DEVICES, or set the trainer's group_backend=gloo"
        )


def main() -> None:
    """Join the group, then run jobs until the input ends or a member is lost."""
    membership = GroupMembership(**json.loads(sys.argv[1]))
    events = os.fdopen(os.dup(sys.stdin.fileno()), "w")
    jobs: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    try:
        _join(membership, events)
        _emit(events, event="joined")
        while True:
            job = jobs.get()
            _transfer(membership, job["path"], job["size"])
            _emit(events, event="done")
    except Exception as error:
        missing = error.ranks if isinstance(error, MissingRanksError) else ()
        _emit(events, event="failed", error=f"{type(error).__name__}: {error}", missing=list(missing))
        os._exit(1)  # does not wait for collectives that will never complete


def _read(jobs: SimpleQueue[dict[str, Any]]) -> NoReturn:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)  # the service is gone; there is no other way to interrupt a collective


def _emit(events: TextIO, **message: Any) -> None:
    events.write(json.dumps(message) + "\n")
    events.flush()


def _join(membership: GroupMembership, events: TextIO) -> None:
    host, _, port = membership.address.rpartition(":")
    own = _own_address(host)
    store = _listen(host, int(port)) if membership.rank == 0 else TCPStore(host, int(port), timeout=_JOIN_TIMEOUT)
    if membership.rank == 0:
        _emit(events, event="listening", port=store.port)
    gpu = _select_gpu() if membership.backend == "nccl" else None
    uuid = "" if gpu is None else str(torch.cuda.get_device_properties(gpu).uuid)
    meet(PrefixStore(str(membership.generation), store), membership, uuid)
    group_store = PrefixStore(f"{membership.generation}/met", store)
    if interface := _interface(own):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    seconds = timedelta(seconds=membership.seconds)
    dist.init_process_group(
        membership.backend,
        store=group_store,
        rank=membership.rank,
        world_size=membership.size,
        timeout=seconds,
        device_id=gpu,
    )


def _listen(host: str, port: int) -> TCPStore:
    """Open the store on one address only; by default it would listen on all addresses."""
    listener = socket.create_server((host, port))
    bound = listener.getsockname()[1]
    return TCPStore(
        host, bound, is_master=True, timeout=_JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def meet(store: Store, membership: GroupMembership, gpu: str) -> None:
    """Wait until every member has joined, each on its own GPU. `gpu` is this member's GPU UUID; empty without GPUs.

    Raises MissingRanksError and, at rank 0, SharedGpuError; the other ranks then fail because rank 0 exits.
    """
    store.set(str(membership.rank), gpu or f"rank {membership.rank}")
    ranks = range(membership.size)
    try:
        store.wait([str(rank) for rank in ranks], _JOIN_TIMEOUT)
    except dist.DistStoreError as error:
        raise MissingRanksError([rank for rank in ranks if not store.check([str(rank)])]) from error
    if membership.rank:
        store.wait(["go"], _JOIN_TIMEOUT)
        return
    # Rank 0 compares the GPUs for all. The others wait for its word, so that none uses NCCL before.
    places = [store.get(str(rank)) for rank in ranks]
    if shared := [rank for rank in ranks if places[rank] in places[:rank]]:
        raise SharedGpuError(shared)
    store.set("go", "")


def _select_gpu() -> torch.device:
    """Select the first GPU visible to this process explicitly, because NCCL would otherwise use any."""
    if not torch.cuda.is_available():
        raise RuntimeError("group_backend=nccl needs a GPU for each member; set the trainer's group_backend=gloo")
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    return gpu


def _own_address(host: str) -> str:
    """Return the local address from which this machine reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _interface(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _transfer(membership: GroupMembership, path: str | None, size: int) -> None:
    """Broadcast a file's bytes from rank 0 in chunks, directly from and into memory-mapped files."""
    if path is None:
        content = torch.empty(size, dtype=torch.uint8)
    else:
        content = torch.from_file(path, shared=membership.rank != 0, size=size, dtype=torch.uint8)
    for piece in torch.split(content, CHUNK_BYTES):
        if membership.backend == "gloo":
            dist.broadcast(piece, src=0)
        else:
            _broadcast_on_gpu(piece, sends=membership.rank == 0)


def _broadcast_on_gpu(piece: torch.Tensor, *, sends: bool) -> None:
    on_gpu = piece.cuda() if sends else torch.empty_like(piece, device="cuda")
    dist.broadcast(on_gpu, src=0)
    torch.cuda.synchronize()
    if not sends:
        piece.copy_(on_gpu)


if __name__ == "__main__":
    main()

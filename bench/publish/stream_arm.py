"""One end of an arm of stream.py, in its own process.

    python -m bench.publish.stream_arm serve ARM CORE FILE          prints its port
    python -m bench.publish.stream_arm read ARM CORE FILE PORT      ready when it prints a line

On an input line `measure` the reader streams the file once and prints the seconds; on `trace` either end prints the
peak bytes of Python objects since the line before.

Arms: `plain`, a generated servicer and stub with gRPC's own options; `ours`, replies written and read as bytes, over a
sampler's channel; `staged`, the stream of `ours` written to a file as the sampler does, with the BLAKE3 of the whole.
All have the same checksums and chunks.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import google_crc32c
import grpc

from paceline import weights
from paceline.rpc.channel import open_channel
from paceline.weights.v1 import weight_service_pb2 as pb
from paceline.weights.v1.weight_service_pb2_grpc import (
    WeightServiceServicer,
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)
from paceline.weights.wire import CHUNK_BYTES
from sampler_service.transports.staging import StagingArea


class Plain(WeightServiceServicer):
    """Serves a file as message objects."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def WatchVersions(  # noqa: N802 - the contract's name
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)
        yield pb.WatchVersionsResponse()

    async def FetchVersion(  # noqa: N802 - the contract's name
        self, request: pb.FetchVersionRequest, context: Any
    ) -> AsyncIterator[pb.FetchVersionResponse]:
        offset = 0
        with self._file.open("rb", buffering=0) as file:
            while data := file.read(CHUNK_BYTES):
                chunk = pb.Chunk(offset=offset, data=data, crc32c=google_crc32c.value(data))
                yield pb.FetchVersionResponse(chunk=chunk)
                offset += len(data)


async def serve(arm: str, file: Path) -> None:
    """Serve until the input ends."""

    async def replies(request: pb.FetchVersionRequest, context: Any) -> AsyncIterator[bytes]:
        for reply in weights.read_replies(file):
            yield reply

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_WeightServiceServicer_to_server(Plain(file), server)
    if arm != "plain":
        weights.add_fetch_version(server, replies)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    while await asyncio.to_thread(sys.stdin.readline):
        print(traced(), flush=True)


async def read(arm: str, file: Path, port: int) -> None:
    """Execute each line of input."""
    manifest = await asyncio.to_thread(describe, file)
    with TemporaryDirectory(dir=file.parent) as folder:
        area = StagingArea(Path(folder))
        async with connect(arm, f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            print("ready", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(await timed(arm, channel, area, manifest) if line == "measure\n" else traced(), flush=True)
        area.close()


def connect(arm: str, target: str) -> grpc.aio.Channel:
    """Open the arm's channel: gRPC's own options, or a sampler's."""
    return grpc.aio.insecure_channel(target) if arm == "plain" else open_channel(target, bulk=True)


def describe(file: Path) -> pb.Manifest:
    """Return the manifest that receiving a file needs."""
    manifest = pb.Manifest(total_size=file.stat().st_size)
    manifest.model.blake3 = weights.blake3_of(file)
    return manifest


async def timed(arm: str, channel: grpc.aio.Channel, area: StagingArea, manifest: pb.Manifest) -> float:
    """Read the stream as the arm does; return the seconds."""
    start = perf_counter()
    if arm == "plain":
        await read_plain(channel)
    elif arm == "ours":
        await read_ours(channel)
    else:
        await read_staged(channel, area, manifest)
    return perf_counter() - start


async def read_plain(channel: grpc.aio.Channel) -> None:
    """Read with a generated stub and verify each chunk."""
    async for part in WeightServiceStub(channel).FetchVersion(pb.FetchVersionRequest()):
        data = part.chunk.data
        if google_crc32c.value(data) != part.chunk.crc32c:
            raise ValueError("damaged")


async def read_ours(channel: grpc.aio.Channel) -> None:
    """Verify each chunk in place in its message."""
    async for part in weights.read_parts(weights.fetch_version(channel)(pb.FetchVersionRequest())):
        if not isinstance(part, weights.Piece) or not part.is_intact:
            raise ValueError("damaged")
        del part


async def read_staged(channel: grpc.aio.Channel, area: StagingArea, manifest: pb.Manifest) -> None:
    """Write the stream to a new file, then discard it."""
    async with area.receive(manifest) as receiver:
        async for part in weights.read_parts(weights.fetch_version(channel)(pb.FetchVersionRequest())):
            if isinstance(part, weights.Piece):
                await receiver.write(part)
            del part
        await (await receiver.finish()).discard()


def traced() -> int:
    """Return the peak bytes of Python objects since the last call; the first call starts tracing."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    return most


if __name__ == "__main__":
    role, chosen, core, name, *rest = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    asyncio.run(serve(chosen, Path(name)) if role == "serve" else read(chosen, Path(name), int(rest[0])))

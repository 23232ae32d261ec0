"""The stream of weights on the wire: generated stubs read what our code writes, and our code reads theirs."""

from __future__ import annotations

from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.message import DecodeError
from support.patience import standing_still

from paceline import weights
from paceline.rpc.channel import open_channel
from paceline.weights.v1 import weight_service_pb2 as pb
from paceline.weights.v1.weight_service_pb2_grpc import (
    WeightServiceServicer,
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)
from paceline.weights.wire import CHUNK_BYTES, read_part

CONTENT = bytes(range(256)) * 4100 * 2  # two chunks and a part of one
DATA, CRC32C = b"weights", 0xC3B3BB33


class Stock(WeightServiceServicer):
    """Serves a file with generated messages."""

    def __init__(self, file):
        self.file = file

    def WatchVersions(self, request_iterator, context):  # noqa: N802
        raise AssertionError

    async def FetchVersion(self, request, context):  # noqa: N802
        yield pb.FetchVersionResponse(manifest=pb.Manifest(tenant="theirs"))
        for reply in weights.read_replies(self.file):
            yield pb.FetchVersionResponse.FromString(reply)


@asynccontextmanager
async def _serving(file, replies=None):
    """Serve a file with `Stock`, or FetchVersion with `replies`, which yields bytes; yield the address."""
    server = grpc.aio.server()
    add_WeightServiceServicer_to_server(Stock(file), server)
    if replies is not None:
        weights.add_fetch_version(server, replies)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def _replies(file, *, ours):
    """Return what a generated stub and what our reader get from a server."""

    async def replies(request, context):
        yield pb.FetchVersionResponse(manifest=pb.Manifest(tenant="ours")).SerializeToString()
        for reply in weights.read_replies(file):
            yield reply

    async with _serving(file, replies if ours else None) as address, open_channel(address, bulk=True) as channel:
        stock = [part async for part in WeightServiceStub(channel).FetchVersion(pb.FetchVersionRequest())]
        call = weights.fetch_version(channel)(pb.FetchVersionRequest())
        return stock, [part async for part in weights.read_parts(call)]


@pytest.mark.parametrize("ours", [True, False])
async def test_generated_and_own_code_understand_each_other(tmp_path, ours):
    file = tmp_path / "weights"
    file.write_bytes(CONTENT)
    stock, own = await _replies(file, ours=ours)
    assert stock[0].manifest.tenant == own[0].manifest.tenant == ("ours" if ours else "theirs")
    assert (
        [part.chunk.offset for part in stock[1:]]
        == [piece.offset for piece in own[1:]]
        == [
            0,
            CHUNK_BYTES,
            2 * CHUNK_BYTES,
        ]
    )
    assert b"".join(part.chunk.data for part in stock[1:]) == b"".join(piece.data for piece in own[1:]) == CONTENT
    assert [part.chunk.crc32c for part in stock[1:]] == [piece.crc32c for piece in own[1:]]
    assert all(piece.is_intact for piece in own[1:])


async def test_a_reader_that_pauses_receives_few_chunks_ahead(tmp_path):
    """With gRPC's default options, 5 to 13 chunks arrive."""
    file, sent = tmp_path / "weights", 0
    file.write_bytes(bytes(64 * CHUNK_BYTES))

    async def replies(request, context):
        nonlocal sent
        for reply in weights.read_replies(file):
            sent += 1
            yield reply

    async with _serving(file, replies) as address, open_channel(address, bulk=True) as channel:
        call = weights.fetch_version(channel)(pb.FetchVersionRequest())
        for _ in range(16):
            await call.read()
        assert await standing_still(lambda: sent) - 16 <= 4
        call.cancel()


def _field(tag, payload):
    assert len(payload) < 128
    return bytes((tag, len(payload))) + payload


OFFSET, BODY, SUM = b"\x08\xac\x02", _field(0x12, b"weights"), b"\x1d" + CRC32C.to_bytes(4, "little")


@pytest.mark.parametrize(
    "message",
    [
        _field(0x12, OFFSET + BODY + SUM),
        _field(0x12, SUM + BODY + OFFSET),
        _field(0x12, OFFSET + _field(0x12, b"replaced later") + SUM + BODY),
        _field(0x12, OFFSET + SUM + BODY + b"\x50\x01"),  # a field of a later contract
        _field(0x12, b"\x08\xac\x82\x80\x00" + BODY + SUM),  # a varint longer than necessary
        _field(0x12, OFFSET) + _field(0x12, BODY + SUM),  # a message in two parts, which are merged
        b"\x50\x01" + _field(0x12, OFFSET + BODY + SUM),
    ],
)
def test_a_chunk_is_read_however_it_is_laid_out(message):
    piece = read_part(message)
    stock = pb.FetchVersionResponse.FromString(message).chunk
    assert (piece.offset, bytes(piece.data), piece.crc32c) == (stock.offset, stock.data, stock.crc32c)
    assert (piece.offset, bytes(piece.data), piece.crc32c) == (300, DATA, CRC32C)


def test_a_cut_message_is_an_error():
    whole = _field(0x12, OFFSET + BODY + SUM)
    for length in range(1, len(whole)):
        with pytest.raises(DecodeError):
            read_part(whole[:length])
    with pytest.raises(DecodeError):
        read_part(_field(0x12, OFFSET + b"\x12\x7f" + DATA))


def test_missing_fields_have_their_defaults():
    piece = read_part(_field(0x12, b""))
    assert (piece.offset, bytes(piece.data), piece.crc32c) == (0, b"", 0)
    assert read_part(b"") == pb.FetchVersionResponse()


def test_a_file_that_shrinks_is_not_padded(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(CONTENT)
    replies = weights.read_replies(file)
    next(replies)
    file.write_bytes(CONTENT[:CHUNK_BYTES])
    with pytest.raises(EOFError):
        next(replies)


def test_a_file_that_is_removed_is_read_to_its_end(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(CONTENT)
    replies = weights.read_replies(file)
    file.unlink()
    assert b"".join(bytes(read_part(reply).data) for reply in replies) == CONTENT

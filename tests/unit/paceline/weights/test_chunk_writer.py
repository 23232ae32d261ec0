"""What arrives in chunks is the manifest's file, byte for byte, or is refused."""

import pytest

from paceline import errors, weights
from paceline.weights.v1 import weight_service_pb2 as pb
from paceline.weights.wire import read_part

CONTENT = bytes(range(256)) * 4100 * 2  # two chunks and a part of one


@pytest.fixture
def sent(tmp_path):
    """A file, its manifest and its chunks."""
    file = tmp_path / "sent"
    file.write_bytes(CONTENT)
    manifest = pb.Manifest(total_size=len(CONTENT))
    manifest.model.blake3 = weights.blake3_of(file)
    return manifest, [read_part(reply) for reply in weights.read_replies(file)]


def receive(path, manifest, chunks):
    writer = weights.ChunkWriter(path, manifest)
    try:
        for chunk in chunks:
            writer.write(chunk)
        return writer.finish()
    finally:
        writer.close()


def test_the_file_is_written_and_its_hash_returned(tmp_path, sent):
    manifest, chunks = sent
    assert receive(tmp_path / "file", manifest, chunks) == manifest.model.blake3
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_whole_chunks_of_another_file_are_refused_at_the_end(tmp_path, sent):
    manifest, chunks = sent
    (tmp_path / "other").write_bytes(b"!" + CONTENT[1:])
    others = [read_part(reply) for reply in weights.read_replies(tmp_path / "other")]
    with pytest.raises(errors.ChecksumMismatch, match="differ from the manifest's"):
        receive(tmp_path / "file", manifest, [others[0], *chunks[1:]])


def test_a_file_that_ends_early_is_refused(tmp_path, sent):
    manifest, chunks = sent
    with pytest.raises(errors.ChecksumMismatch, match="differ from the manifest's"):
        receive(tmp_path / "file", manifest, chunks[:-1])

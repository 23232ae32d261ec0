"""The manifest of a directory of weights: the model, its tenant, its tensors, and the SHA-256 of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import google_crc32c
from google.protobuf import json_format

from paceline import errors
from paceline.codec.models import served_model_from_proto, served_model_to_proto
from paceline.layout import ADAPTER_FILES, CONFIG_FILE, MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from paceline.types import ServedModel
from paceline.types.v1 import tensor_pb2
from paceline.weights.adapter_config import read_adapter_config
from paceline.weights.v1 import weight_service_pb2 as pb

_DTYPES = {
    "F32": tensor_pb2.DTYPE_FLOAT32,
    "BF16": tensor_pb2.DTYPE_BFLOAT16,
    "F16": tensor_pb2.DTYPE_FLOAT16,
}
_ITEM_BYTES = {tensor_pb2.DTYPE_FLOAT32: 4, tensor_pb2.DTYPE_BFLOAT16: 2, tensor_pb2.DTYPE_FLOAT16: 2}
_MAX_HEADER = 100_000_000  # the limit of the safetensors format
_PIECE_BYTES = 1 << 18  # stays in the processor's cache between reading and checksumming


def describe_adapter(directory: Path, model: ServedModel, *, tenant: str, step: int, seq_id: int = 0) -> pb.Manifest:
    """Create the manifest of a PEFT directory from its files, with checksums.

    `seq_id` is that of the command that created the weights. Raises the errors of `read_tensor_entries` and
    `read_adapter_config`.
    """
    return seal(directory, _draft_adapter(directory, model, tenant, step, seq_id))


def describe_weights(
    directory: Path, model: ServedModel, *, tenant: str, step: int, seq_id: int = 0, base_sha256: str = ""
) -> pb.Manifest:
    """Create the manifest of a directory that holds an adapter or a whole model. See `draft_manifest`."""
    draft = draft_manifest(directory, model, tenant=tenant, step=step, seq_id=seq_id, base_sha256=base_sha256)
    return seal(directory, draft)


def draft_manifest(
    directory: Path, model: ServedModel, *, tenant: str, step: int, seq_id: int = 0, base_sha256: str = ""
) -> pb.Manifest:
    """Create a manifest as `describe_weights` does, but without the checksums, which take longest.

    `base_sha256` is the identity of the base weights on which these weights were made; empty if unknown.
    """
    if (directory / WEIGHTS_FILE).exists():
        draft = _draft_adapter(directory, model, tenant, step, seq_id)
    else:
        draft = _draft(directory / MODEL_FILE, model, tenant, step, seq_id)
    draft.base_sha256 = base_sha256
    return draft


def seal(directory: Path, draft: pb.Manifest) -> pb.Manifest:
    """Return the draft with the checksums of the directory's weights."""
    weights = directory / weights_file(draft)
    manifest = pb.Manifest()
    manifest.CopyFrom(draft)
    digest, checksum = hashlib.sha256(), 0
    for piece in _pieces(weights):
        digest.update(piece)
        checksum = google_crc32c.extend(checksum, piece)
    manifest.model.sha256, manifest.crc32c = digest.hexdigest(), checksum
    return manifest


def is_sealed(manifest: pb.Manifest, draft: pb.Manifest) -> bool:
    """Whether a manifest is a draft with its checksums added."""
    rest = pb.Manifest()
    rest.CopyFrom(manifest)
    rest.model.ClearField("sha256")
    rest.ClearField("crc32c")
    return rest == draft


def is_model(manifest: pb.Manifest) -> bool:
    """Whether a manifest describes a whole model rather than an adapter."""
    return not manifest.adapter_config and manifest.rank == 0


def weights_file(manifest: pb.Manifest) -> str:
    """Return the name of the file whose SHA-256 is in a manifest."""
    return MODEL_FILE if is_model(manifest) else WEIGHTS_FILE


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32c_of(path: Path) -> int:
    """Return the CRC-32C of a file."""
    checksum = 0
    for piece in _pieces(path):
        checksum = google_crc32c.extend(checksum, piece)
    return checksum


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def write_manifest(directory: Path, manifest: pb.Manifest) -> None:
    """Write the manifest beside the weights that it describes."""
    (directory / MANIFEST_FILE).write_text(json_format.MessageToJson(manifest))


def read_manifest(directory: Path) -> pb.Manifest:
    """Read a directory's manifest. Raises FileNotFoundError if there is none, ChecksumMismatch if it is damaged."""
    text = (directory / MANIFEST_FILE).read_bytes()
    try:
        return json_format.Parse(text, pb.Manifest())
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise errors.ChecksumMismatch("the manifest is damaged; restore the directory from a backup") from error


def verify_adapter(directory: Path, manifest: pb.Manifest) -> str:
    """Check that a directory holds exactly the adapter of the manifest, and return the computed SHA-256."""
    foreign = {path.name for path in directory.iterdir()} - ADAPTER_FILES
    if foreign:
        raise errors.ChecksumMismatch("the adapter's directory holds files that do not belong there")
    computed = hash_file(directory / WEIGHTS_FILE)
    if computed != manifest.model.sha256 or (directory / CONFIG_FILE).read_bytes() != manifest.adapter_config:
        raise errors.ChecksumMismatch("the adapter differs from its manifest; publish or save it again")
    return computed


def served_model(manifest: pb.Manifest) -> ServedModel:
    """Return the model that the manifest describes."""
    return served_model_from_proto(manifest.model)


def read_header(weights: Path) -> bytes:
    """Return the JSON header of a safetensors file, which is equal for files of one layout, such as a run's versions.

    Raises ChecksumMismatch if the file ends before the header does.
    """
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER))
    if not header or len(header) != length:
        raise errors.ChecksumMismatch("is not a safetensors file", field=weights.name)
    return header


def read_tensor_entries(weights: Path) -> list[pb.TensorEntry]:
    """Return the tensors of a safetensors file and their positions.

    Raises ChecksumMismatch unless they tile the file exactly, InvalidShape if a tensor's size does not match its shape
    and dtype, InvalidDtype.
    """
    header = read_header(weights)
    try:
        entries = _parse_header(header)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise errors.ChecksumMismatch("is not a safetensors file", field=weights.name) from error
    ends = [8 + len(header), *(entry.offset + entry.size for entry in entries)]
    if [entry.offset for entry in entries] != ends[:-1] or ends[-1] != weights.stat().st_size:
        raise errors.ChecksumMismatch("tensors do not tile the file; it is damaged", field=weights.name)
    return list(entries)


@lru_cache(maxsize=16)
def _parse_header(text: bytes) -> tuple[pb.TensorEntry, ...]:
    """Return the tensors in order of offset. Cached: a run's versions share one header, read several times for each."""
    base = 8 + len(text)
    header: dict[str, Any] = json.loads(text)
    header.pop("__metadata__", None)
    return tuple(sorted((_entry(name, facts, base) for name, facts in header.items()), key=attrgetter("offset")))


def _draft_adapter(directory: Path, model: ServedModel, tenant: str, step: int, seq_id: int) -> pb.Manifest:
    manifest = _draft(directory / WEIGHTS_FILE, model, tenant, step, seq_id)
    config = read_adapter_config(directory / CONFIG_FILE)
    manifest.adapter_config, manifest.rank = config.text, config.rank
    return manifest


def _draft(weights: Path, model: ServedModel, tenant: str, step: int, seq_id: int) -> pb.Manifest:
    manifest = pb.Manifest(
        model=served_model_to_proto(model),
        tenant=tenant,
        tensors=read_tensor_entries(weights),
        total_size=weights.stat().st_size,
        step=step,
        seq_id=seq_id,
    )
    manifest.create_time.GetCurrentTime()
    return manifest


def _entry(name: str, facts: dict[str, Any], base: int) -> pb.TensorEntry:
    start, end = facts["data_offsets"]
    dtype = _DTYPES.get(facts["dtype"])
    if dtype is None:
        raise errors.InvalidDtype(f"has dtype {facts['dtype']}; weights are F32, BF16 or F16", field=name)
    shape = facts["shape"]
    if any(extent < 0 for extent in shape) or prod(shape) * _ITEM_BYTES[dtype] != end - start:
        raise errors.InvalidShape(
            f"has shape {shape} of {facts['dtype']}, and {end - start} bytes in the file", field=name
        )
    return pb.TensorEntry(name=name, dtype=dtype, shape=facts["shape"], offset=base + start, size=end - start)

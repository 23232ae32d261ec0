"""The manifest of a directory of weights: what it is, whose it is, its tensors, and the SHA-256 of its weights."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from paceline import errors
from paceline.codec.models import served_model_from_proto, served_model_to_proto
from paceline.codec.times import timestamp_to_proto
from paceline.layout import ADAPTER_FILES, CONFIG_FILE, MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from paceline.types import ServedModel
from paceline.types.v1 import tensor_pb2
from paceline.weights.v1 import weight_service_pb2 as pb

_DTYPES = {
    "F32": tensor_pb2.DTYPE_FLOAT32,
    "BF16": tensor_pb2.DTYPE_BFLOAT16,
    "F16": tensor_pb2.DTYPE_FLOAT16,
}
_MAX_HEADER = 100_000_000  # the limit of the safetensors format


def describe_adapter(directory: Path, model: ServedModel, *, tenant: str, step: int, seq_id: int = 0) -> pb.Manifest:
    """Make the manifest of a PEFT directory by reading it; `model.sha256` is computed here.

    `seq_id` is that of the command that made it.
    """
    manifest = _describe(directory / WEIGHTS_FILE, model, tenant, step, seq_id)
    manifest.adapter_config = (directory / CONFIG_FILE).read_bytes()
    manifest.rank = int(json.loads(manifest.adapter_config)["r"])
    return manifest


def describe_weights(directory: Path, model: ServedModel, *, tenant: str, step: int, seq_id: int = 0) -> pb.Manifest:
    """Make the manifest of a directory that holds an adapter or a whole model; arguments as `describe_adapter`."""
    if (directory / WEIGHTS_FILE).exists():
        return describe_adapter(directory, model, tenant=tenant, step=step, seq_id=seq_id)
    return _describe(directory / MODEL_FILE, model, tenant, step, seq_id)


def is_model(manifest: pb.Manifest) -> bool:
    """Whether a manifest describes a whole model and no adapter."""
    return not manifest.adapter_config and manifest.rank == 0


def weights_file(manifest: pb.Manifest) -> str:
    """Return the name of the file that a manifest's SHA-256 is of."""
    return MODEL_FILE if is_model(manifest) else WEIGHTS_FILE


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, manifest: pb.Manifest) -> None:
    """Write the manifest beside the adapter that it describes."""
    (directory / MANIFEST_FILE).write_text(json_format.MessageToJson(manifest))


def read_manifest(directory: Path) -> pb.Manifest:
    """Read a directory's manifest. Raises FileNotFoundError when there is none, ChecksumMismatch when it is damaged."""
    text = (directory / MANIFEST_FILE).read_text()
    try:
        return json_format.Parse(text, pb.Manifest())
    except json_format.ParseError as error:
        raise errors.ChecksumMismatch("the manifest is damaged; restore the directory from a backup") from error


def verify_adapter(directory: Path, manifest: pb.Manifest) -> str:
    """Check that a directory holds exactly the adapter that the manifest describes; return the computed SHA-256."""
    foreign = {path.name for path in directory.iterdir()} - ADAPTER_FILES
    if foreign:
        raise errors.ChecksumMismatch("the adapter's directory holds files that do not belong there")
    computed = hash_file(directory / WEIGHTS_FILE)
    if computed != manifest.model.sha256 or (directory / CONFIG_FILE).read_bytes() != manifest.adapter_config:
        raise errors.ChecksumMismatch("the adapter differs from its manifest; publish or save it again")
    return computed


def served_model(manifest: pb.Manifest) -> ServedModel:
    """Return what the manifest describes."""
    return served_model_from_proto(manifest.model)


def read_tensor_entries(weights: Path) -> list[pb.TensorEntry]:
    """Read the header of a safetensors file. Raises ChecksumMismatch unless its tensors tile the file exactly."""
    try:
        with weights.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, _MAX_HEADER)))
    except (ValueError, struct.error) as error:
        raise errors.ChecksumMismatch("is not a safetensors file", field=weights.name) from error
    header.pop("__metadata__", None)
    base = 8 + length
    entries = [_entry(name, facts, base) for name, facts in header.items()]
    entries.sort(key=lambda entry: entry.offset)
    ends = [base, *(entry.offset + entry.size for entry in entries)]
    if [entry.offset for entry in entries] != ends[:-1] or ends[-1] != weights.stat().st_size:
        raise errors.ChecksumMismatch("tensors do not tile the file; it is damaged", field=weights.name)
    return entries


def _describe(weights: Path, model: ServedModel, tenant: str, step: int, seq_id: int) -> pb.Manifest:
    return pb.Manifest(
        model=served_model_to_proto(replace(model, sha256=hash_file(weights))),
        tenant=tenant,
        tensors=read_tensor_entries(weights),
        total_size=weights.stat().st_size,
        step=step,
        create_time=timestamp_to_proto(datetime.now(UTC)),
        seq_id=seq_id,
    )


def _entry(name: str, facts: dict[str, Any], base: int) -> pb.TensorEntry:
    start, end = facts["data_offsets"]
    dtype = _DTYPES.get(facts["dtype"])
    if dtype is None:
        raise errors.InvalidDtype(f"has dtype {facts['dtype']}; weights are F32, BF16 or F16", field=name)
    return pb.TensorEntry(name=name, dtype=dtype, shape=facts["shape"], offset=base + start, size=end - start)

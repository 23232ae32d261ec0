"""Weights in transfer: manifests, chunks and checksums.

The bytes transferred are the safetensors file itself.
"""

from paceline.weights.hashing import blake3_of, crc32c_of, sha256_of
from paceline.weights.manifest import (
    AdapterConfig,
    Sums,
    describe_weights,
    draft_manifest,
    find_damaged,
    is_model,
    parse_adapter_config,
    read_adapter_config,
    read_manifest,
    seal,
    verify_adapter,
    verify_model,
    weights_file,
    write_manifest,
    write_sums,
)
from paceline.weights.safetensors import check_finite, copy_tensors, read_header, read_tensor_entries
from paceline.weights.wire import (
    ChunkWriter,
    Part,
    Piece,
    absent,
    add_fetch_version,
    fetch_version,
    read_parts,
    read_replies,
)

__all__ = [
    "AdapterConfig",
    "ChunkWriter",
    "Part",
    "Piece",
    "Sums",
    "absent",
    "add_fetch_version",
    "blake3_of",
    "check_finite",
    "copy_tensors",
    "crc32c_of",
    "describe_weights",
    "draft_manifest",
    "fetch_version",
    "find_damaged",
    "is_model",
    "parse_adapter_config",
    "read_adapter_config",
    "read_header",
    "read_manifest",
    "read_parts",
    "read_replies",
    "read_tensor_entries",
    "seal",
    "sha256_of",
    "verify_adapter",
    "verify_model",
    "weights_file",
    "write_manifest",
    "write_sums",
]

"""Weights in transfer: manifests, chunks and checksums.

The bytes transferred are the safetensors file itself.
"""

from paceline.weights.adapter_config import AdapterConfig, parse_adapter_config, read_adapter_config
from paceline.weights.chunks import ChunkWriter, read_replies
from paceline.weights.finite import check_finite
from paceline.weights.manifest import (
    crc32c_of,
    describe_adapter,
    describe_weights,
    draft_manifest,
    hash_file,
    is_model,
    is_sealed,
    read_header,
    read_manifest,
    read_tensor_entries,
    seal,
    served_model,
    verify_adapter,
    weights_file,
    write_manifest,
)
from paceline.weights.sums import find_damaged, verify_model, write_sums
from paceline.weights.wire import Part, Piece, add_fetch_version, fetch_version, read_parts

__all__ = [
    "AdapterConfig",
    "ChunkWriter",
    "Part",
    "Piece",
    "add_fetch_version",
    "check_finite",
    "crc32c_of",
    "describe_adapter",
    "describe_weights",
    "draft_manifest",
    "fetch_version",
    "find_damaged",
    "hash_file",
    "is_model",
    "is_sealed",
    "parse_adapter_config",
    "read_adapter_config",
    "read_header",
    "read_manifest",
    "read_parts",
    "read_replies",
    "read_tensor_entries",
    "seal",
    "served_model",
    "verify_adapter",
    "verify_model",
    "weights_file",
    "write_manifest",
    "write_sums",
]

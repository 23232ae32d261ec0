"""Weights on their way: their manifest, their chunks, their checksums.

The bytes that travel are the safetensors file itself.
"""

from paceline.weights.chunks import ChunkWriter, read_chunks
from paceline.weights.manifest import (
    describe_adapter,
    describe_weights,
    hash_file,
    is_model,
    read_manifest,
    read_tensor_entries,
    served_model,
    verify_adapter,
    weights_file,
    write_manifest,
)
from paceline.weights.sums import find_damaged, verify_model, write_sums

__all__ = [
    "ChunkWriter",
    "describe_adapter",
    "describe_weights",
    "find_damaged",
    "hash_file",
    "is_model",
    "read_chunks",
    "read_manifest",
    "read_tensor_entries",
    "served_model",
    "verify_adapter",
    "verify_model",
    "weights_file",
    "write_manifest",
    "write_sums",
]

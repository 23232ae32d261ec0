"""An adapter on its way: its manifest, its chunks, its checksums.

The bytes that travel are the safetensors file itself.
"""

from paceline.weights.chunks import ChunkWriter, read_chunks
from paceline.weights.manifest import (
    describe_adapter,
    describe_model,
    hash_file,
    is_model,
    read_manifest,
    read_tensor_entries,
    served_model,
    verify_adapter,
    write_manifest,
)

__all__ = [
    "ChunkWriter",
    "describe_adapter",
    "describe_model",
    "hash_file",
    "is_model",
    "read_chunks",
    "read_manifest",
    "read_tensor_entries",
    "served_model",
    "verify_adapter",
    "write_manifest",
]

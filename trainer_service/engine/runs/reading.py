"""Read a run's files, safetensors and JSON, with typed errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import CheckpointMismatch, ChecksumMismatch

T = TypeVar("T")


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check that tensors have exactly these names and shapes, and one of `dtypes`. Raises CheckpointMismatch."""
    if odd := sorted(tensors.keys() ^ shapes.keys()):
        where = "only in the checkpoint" if odd[0] in tensors else "missing from the checkpoint"
        raise CheckpointMismatch(f"{len(odd)} tensors do not match; {odd[0]} is {where}.")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise CheckpointMismatch(f"{name} is {list(tensor.shape)}, and {list(shapes[name])} in the run.")
        if tensor.dtype not in dtypes:
            raise CheckpointMismatch(f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises CheckpointMismatch if it is missing, ChecksumMismatch if it is damaged."""
    if not path.is_file():
        raise CheckpointMismatch(f"the checkpoint has no {path.name}.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ChecksumMismatch(f"{path.name} is damaged: {error}.") from error


def read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file as a `kind`. Raises CheckpointMismatch."""
    if not path.is_file():
        raise CheckpointMismatch(f"the checkpoint has no {path.name}.")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise CheckpointMismatch(f"{path.name} cannot be read: {error}.") from error

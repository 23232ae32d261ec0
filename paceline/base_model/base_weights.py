"""The identity of a base model's weights: a hash that trainer and sampler compute from the files and compare.

It is the SHA-256 of one line per tensor, sorted: [name, dtype, shape, SHA-256 of its bytes] as JSON, all as stored. It
does not depend on how a checkpoint is split into files, on the number of threads or on the machine. Different weights,
dtypes or tensor names give a different hash. The model's name and path are not part of it.

Hashing takes about a second per GB and processor, for files in the hub's cache and local ones alike. The digests of a
file are cached in $XDG_CACHE_HOME/paceline (by default below ~/.cache) for as long as the file has the same path,
inode, size and modification time, so that a machine reads a large model only once for this.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline import errors, layout
from paceline.log import get_logger
from paceline.weights import read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PIECE_BYTES = 1 << 20
_MAX_THREADS = 16
_MAX_CACHED_FILES = 4096
"""Number of files whose digests the cache holds."""

_log = get_logger(__name__)


def base_weights_sha256(model: str) -> str:
    """Return the identity of a model's weights; empty if it has no safetensors files on this machine.

    `model` is a local directory, or a Hugging Face id that was downloaded. Raises ChecksumMismatch for a file that is
    not a safetensors file or is truncated.
    """
    directory = _directory(model)
    files = [] if directory is None else weights_files(directory)
    if not files:
        _log.warning("base weights have no identity, because there are no safetensors files", model=model)
        return ""
    lines = sorted(line for file in files for line in _digests(file))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_same_base(ours: str, theirs: str, what: str) -> None:
    """Refuse weights of another base; an empty hash means unknown and is accepted.

    `what` introduces `theirs` in the message, as in "the checkpoint was made on". Raises BaseMismatch, naming both.
    """
    if ours and theirs and ours != theirs:
        raise errors.BaseMismatch(
            f"{what} base weights {theirs}, but these are {ours}; use the model that it was made on",
            metadata={"theirs": theirs, "ours": ours},
        )


def _directory(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only needed for hub ids
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", _INDEX], local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def weights_files(directory: Path) -> list[Path]:
    """Return the files that transformers loads: those of the index, else the single file, else all in the directory."""
    if (index := directory / _INDEX).is_file():
        return [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    if (single := directory / _SINGLE).is_file():
        return [single]
    return layout.entries(directory, "*.safetensors")


def _digests(file: Path) -> Sequence[str]:
    """Return one line per tensor of a file, from the cache if the file is unchanged."""
    cache, key = _cache_file(), _key(file)
    known = _read_cache(cache)
    if key not in known:
        known = {**_read_cache(cache), key: list(_hash_tensors(file, key))}
        kept = dict(list(known.items())[-_MAX_CACHED_FILES:])
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            layout.write_file(cache, json.dumps(kept).encode())
        except (OSError, errors.DiskFull) as error:
            _log.warning("the hash of base weights cannot be cached; it is computed at each start", error=str(error))
    return known[key]


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "base-weights.json"


def _read_cache(cache: Path) -> dict[str, list[str]]:
    try:
        known = json.loads(cache.read_bytes())
    except (OSError, ValueError):  # missing or truncated: it is rebuilt
        return {}
    return known if isinstance(known, dict) else {}


def _key(file: Path) -> str:
    path = file.resolve()
    status = path.stat()
    return f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


@lru_cache(maxsize=_MAX_CACHED_FILES)
def _hash_tensors(file: Path, _key: str) -> tuple[str, ...]:
    """Return one line per tensor of a file; computed once per process even if no cache can be written."""
    header = read_header(file.resolve())  # the hub's cache links to its files
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        spans = {name: entry["data_offsets"] for name, entry in tensors.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.ChecksumMismatch("is not a safetensors file", field=file.name) from error
    start = 8 + len(header)
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS)) as threads:
        digests = threads.map(lambda span: _hash_range(file, start + span[0], start + span[1]), spans.values())
        return tuple(
            json.dumps([name, entry["dtype"], entry["shape"], digest]) + "\n"
            for (name, entry), digest in zip(tensors.items(), digests, strict=True)
        )


def _hash_range(file: Path, start: int, end: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while start < end:
            piece = opened.read(min(_PIECE_BYTES, end - start))
            if not piece:
                raise errors.ChecksumMismatch("ends before its last tensor does", field=file.name)
            digest.update(piece)
            start += len(piece)
    return digest.hexdigest()

"""The base model's tokenizer, fetched from the trainer."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from paceline import errors
from paceline.client.transport import Transport, Worker
from paceline.extras import needing
from paceline.trainer.v1 import trainer_service_pb2 as pb

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def get_tokenizer(transport: Transport, base_model: str) -> PreTrainedTokenizerBase:
    """Fetch the tokenizer of a base model (empty: the served one). Raises ModelNotFound, MissingExtra."""
    reply = await transport.query(transport.trainer.GetTokenizer, pb.GetTokenizerRequest(base_model=base_model))
    with Worker() as worker:
        return await worker.run(lambda: _load(store(dict(reply.files), cache_directory())))


def cache_directory() -> Path:
    """Return the tokenizer cache: $XDG_CACHE_HOME/paceline/tokenizers, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "tokenizers"


def store(files: Mapping[str, bytes], cache: Path) -> Path:
    """Write a tokenizer's files to a directory named by their content hash, unless it exists, and return it.

    Raises InvalidName for a file name that is a path.
    """
    for name in files:
        if name in {"", ".", ".."} or {"/", "\\", "\0"} & set(name):
            raise errors.InvalidName("is not a plain file name; do not trust this service", field="files")
    directory = cache / _content_hash(files)
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    staging = Path(mkdtemp(dir=cache, prefix="."))
    for name, content in files.items():
        (staging / name).write_bytes(content)
    try:
        staging.rename(directory)
    except OSError:
        # Another process has stored the same content first.
        shutil.rmtree(staging)
        if not directory.is_dir():
            raise
    return directory


def _content_hash(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        for piece in (name.encode(), files[name]):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    return digest.hexdigest()


def _load(directory: Path) -> PreTrainedTokenizerBase:
    with needing("tokenizer", "get_tokenizer"):
        from transformers import AutoTokenizer  # noqa: PLC0415 - only needed by clients that request a tokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return tokenizer

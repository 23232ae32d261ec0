"""The files of the base model's tokenizer, so that clients need no copy of the model."""

from __future__ import annotations

from pathlib import Path

_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.tiktoken",
    "spiece.model",
    "config.json",
)


def read_tokenizer_files(model: str) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files by name.

    `model` is a local directory or a Hugging Face id, which is looked up in the hub's cache.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only needed for hub ids

        directory = Path(snapshot_download(model, allow_patterns=list(_PATTERNS)))
    files = {path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()}
    return {path.name: path.read_bytes() for path in sorted(files)}

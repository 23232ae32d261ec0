"""Checks that the base model's files are the same every time that an engine is built from them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from paceline.base_weights import base_weights_sha256
from paceline.errors import ChecksumMismatch

_Digests = tuple[str, str]
"""Identity of the weights, and SHA-256 over the JSON files beside them, which define how to compute with them."""


class BaseFiles:
    """Implements Contents: the files must be those that the first engine was built from."""

    def __init__(self, model_path: Path) -> None:
        """`model_path` is a directory, or the id of a model on the hub, whose snapshots never change."""
        self._path = model_path
        self._digests: _Digests | None = None

    @property
    def sha256(self) -> str:
        """Return the identity of the weights; empty if they have none."""
        return self._digests[0] if self._digests else ""

    async def note(self) -> None:
        """Record the files before the first engine reads them. A missing model is left for the engine to report."""
        if (self._path / "config.json").is_file():
            self._digests = await asyncio.to_thread(_digests, self._path)

    async def verified(self) -> None:
        digests = await asyncio.to_thread(_digests, self._path)
        if digests != (self._digests or digests):
            raise ChecksumMismatch(
                f"the base model's files in {self._path} are others than the sampler began with; put those back, or "
                "start the sampler and its trainer again with these",
                field="model",
            )
        self._digests = digests

    async def verify_again(self) -> None:
        await self.verified()


def _digests(path: Path) -> _Digests:
    told = hashlib.sha256()
    for file in sorted(path.glob("*.json")):
        told.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return base_weights_sha256(str(path)), told.hexdigest()

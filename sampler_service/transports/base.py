"""What transports share: the protocol of bridges, staged files, and which weights are accepted: rank, base, sizes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from paceline import errors
from paceline.base_model.base_weights import check_same_base
from paceline.codec.models import served_model_from_proto
from paceline.files.regular_files import NotRegularFile, lstat_files
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from paceline.weights import absent, blake3_of, is_model, verify_adapter, verify_model, weights_file
from paceline.weights.v1 import weight_service_pb2 as pb

Files = Mapping[str, tuple[int, ...]]
"""File names -> (device, inode, size, mtime), which identify the files of a directory without reading them."""


@dataclass(frozen=True, slots=True)
class VersionKey:
    """One immutable set of weights: a version of a run, or one content of a checkpoint."""

    run_id: str = ""
    version: int = 0
    checkpoint: str = ""
    blake3: str = ""
    """Set for checkpoints only: their path can be overwritten, so the content is part of the key."""

    @classmethod
    def of(cls, model: ServedModel) -> VersionKey:
        """Return the key of a served model."""
        if model.checkpoint:
            return cls(checkpoint=model.checkpoint, blake3=model.blake3)
        return cls(run_id=model.run_id, version=model.version)

    def ref(self) -> ModelRef:
        """Return a reference to these weights."""
        if self.checkpoint:
            return ModelRef(checkpoint=self.checkpoint)
        return ModelRef(run_id=self.run_id, version=self.version)


class ReplacedError(errors.ChecksumMismatch):
    """The verified files were replaced before an engine had loaded them."""


def files_of(directory: Path) -> Files:
    """Return the identity of a directory's files. Raises FileNotFoundError, NotADirectoryError, NotRegularFile."""
    found = lstat_files(directory).items()
    # Not ctime, which also changes when another link to the file is created.
    return {name: (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found}


@dataclass(slots=True, eq=False)
class StagedAdapter:
    """An adapter, or a whole model, in a directory that an engine can load.

    After an engine has loaded it, no request may be answered from it until `verified` returns.
    """

    manifest: pb.Manifest
    directory: Path
    """Holds adapter_model.safetensors and adapter_config.json (PEFT layout), or a Hugging Face model; of a model that
    was sent, only the file with the weights."""
    temporary: bool
    """Whether the directory belongs to this sampler and is removed with the adapter."""
    verifying: asyncio.Task[pb.Manifest] | None = None
    """Verifies the bytes while the adapter is loaded, and returns the manifest with checksums; None if they are already
    verified."""
    files: Files | None = None
    """Identity of the verified files in a directory that others may change; None for this sampler's own directory."""
    on_disk: bool = False
    """Whether this sampler's own directory is on disk; otherwise it is staged in memory."""
    served: ServedModel = field(init=False)
    """The model that the manifest describes; its BLAKE3 is empty if the manifest has none until it is verified."""
    key: VersionKey = field(init=False)
    in_memory: bool = field(init=False)
    """Whether it is in the staging directory."""

    def __post_init__(self) -> None:
        self.served = served_model_from_proto(self.manifest.model)
        self.key = VersionKey.of(self.served)
        self.in_memory = self.temporary and not self.on_disk

    async def verified(self) -> None:
        """Wait until every byte is verified. Raises ChecksumMismatch, TrainerUnavailable.

        An engine reads the files by name after they were verified by name. If they are still the same files, the engine
        has read the verified ones. Raises ReplacedError otherwise.
        """
        if self.verifying is not None:
            self.manifest = await self.verifying
            self.served = replace(self.served, blake3=self.manifest.model.blake3)
        if self.files is not None and await asyncio.to_thread(self._is_replaced):
            raise ReplacedError("the files were replaced while they were loaded; ask again", field="model")

    async def verify_again(self) -> None:
        """Verify every byte again, before an engine reads the files by name again.

        They may be different files with the same bytes. Raises ChecksumMismatch, OSError.
        """
        files = await asyncio.to_thread(self._verify_bytes)
        if self.files is not None:
            self.files = files

    def _verify_bytes(self) -> Files:
        files = files_of(self.directory)
        if not is_model(self.manifest):
            verify_adapter(self.directory, self.manifest)
        elif not self.temporary:
            verify_model(self.directory, self.manifest)
        elif blake3_of(self.directory / weights_file(self.manifest)) != self.served.blake3:
            raise errors.ChecksumMismatch("the bytes do not match the manifest; send them again", field="model")
        if files_of(self.directory) != files:
            raise ReplacedError("the files were replaced while they were verified; ask again", field="model")
        return files

    def _is_replaced(self) -> bool:
        try:
            return files_of(self.directory) != self.files
        except (FileNotFoundError, NotADirectoryError, NotRegularFile):
            return True

    def check_same(self, other: StagedAdapter) -> None:
        """Refuse other content under the same key. Raises VersionExists."""
        if self.served.blake3 != other.served.blake3:
            raise errors.VersionExists("the version exists with other content; publish a new one", field="model")

    async def discard(self) -> None:
        """Remove the files if they belong to this sampler."""
        if self.verifying is not None:
            abandon(self.verifying)
        if self.temporary:
            with suppress(FileNotFoundError):
                await asyncio.to_thread(shutil.rmtree, self.directory)


class Bridge(Protocol):
    """Fetches versions and sampler checkpoints.

    Both calls raise RunNotFound, VersionNotFound, CheckpointNotFound (also for another tenant's), ModelNotFound (made
    for another base model), RankTooLarge, ChecksumMismatch, TrainerUnavailable.
    """

    needs_volume: bool
    """Whether a version can be fetched only once it is on the checkpoint volume."""

    async def describe(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        """Return the manifest of what `ref` names now. Without a version, that is the newest published one."""
        ...

    async def fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        """Fetch an adapter or a whole model. Every byte of it is verified, or is being verified."""
        ...


@dataclass(frozen=True, slots=True)
class ManifestRules:
    """Which weights this sampler accepts; checked before any weights are transferred."""

    base_model: str
    max_lora_rank: int
    max_bytes: int
    """Largest safetensors file of an adapter."""
    whole_models: bool = False
    """Whether it accepts whole models instead of adapters, which belong to the base model only."""
    base_sha256: str = ""
    """Identity of this sampler's base weights; empty if unknown."""

    def check(self, manifest: pb.Manifest) -> None:
        """Refuse weights that the engine cannot load. Raises ModelNotFound, BaseMismatch, Unsupported and others."""
        if is_model(manifest) and not self.whole_models:
            message = "is a whole model; serve it with a sampler that serves models, or that has it as its model"
            raise errors.Unsupported(message, field="model")
        if self.whole_models and not is_model(manifest):
            raise errors.Unsupported("is an adapter; this sampler serves whole models", field="model")
        same_weights = self.base_sha256 and manifest.base_sha256 == self.base_sha256
        if manifest.model.base_model != self.base_model and not same_weights:
            message = f"was trained on {manifest.model.base_model}; this sampler serves {self.base_model} and its runs"
            raise errors.ModelNotFound(message, field="model")
        if not is_model(manifest):
            check_same_base(self.base_sha256, manifest.base_sha256, "the adapter was made on")
        if manifest.rank > self.max_lora_rank:
            raise errors.RankTooLarge(
                f"has rank {manifest.rank}; this sampler takes at most {self.max_lora_rank}", field="model"
            )
        if not self.whole_models and not 0 < manifest.total_size <= self.max_bytes:
            raise errors.InvalidShape(
                f"has {manifest.total_size} bytes; this sampler takes 1 to {self.max_bytes}",
                field="manifest.total_size",
            )


def abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task of whose result nothing depends any more; if it has failed, that is no error to log."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def check_is(manifest: pb.Manifest, ref: ModelRef, tenant: str) -> None:
    """Refuse a manifest of weights other than `ref` names, and one whose owner is not `tenant`.

    Raises ChecksumMismatch, RunNotFound, CheckpointNotFound.
    """
    model = manifest.model
    if ref.checkpoint:
        is_same = model.checkpoint == ref.checkpoint
    else:
        is_same = model.run_id == ref.run_id and ref.version in {None, model.version}
    if not is_same:
        raise errors.ChecksumMismatch("the manifest does not describe the requested weights", field="model")
    check_owner(manifest.tenant, ref, tenant)


def check_owner(owner: str, ref: ModelRef, tenant: str) -> None:
    """Admit the owner, and services that call for themselves. Raises RunNotFound, CheckpointNotFound."""
    if not is_for(owner, tenant):
        raise foreign(ref)


def is_for(owner: str, tenant: str) -> bool:
    """Return whether a tenant may see an owner's weights."""
    return tenant in {PEER_TENANT, owner}


def foreign(ref: ModelRef) -> errors.NotFound:
    """Return the error for another tenant's weights: the same as for a run or a checkpoint that does not exist."""
    if ref.checkpoint:
        return absent(ref)
    return errors.RunNotFound.of(ref.run_id, field="model.version.run_id")


@asynccontextmanager
async def arriving_within(seconds: float) -> AsyncIterator[None]:
    """Bound the time that a version takes to arrive. Raises TrainerUnavailable on timeout."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise errors.TrainerUnavailable("the version did not arrive in time; try again") from error

"""The bridges volume and restart: read versions and checkpoints from the volume where the trainer wrote them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline import errors
from paceline.layout import CheckpointPath, Volume, opened
from paceline.types import ModelRef
from paceline.weights import absent, is_model, read_manifest, verify_adapter, verify_model
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import ManifestRules, StagedAdapter, check_is, files_of, foreign
from sampler_service.transports.trainer_link import TrainerLink

_POLL_SECONDS = 0.01
"""Polling interval for a version that is being written."""
_POLLS = 100
"""After how many the trainer is asked again whether the version exists: its run may have been deleted."""


class VolumeBridge:
    """Reads adapters or whole models from the checkpoint volume; copies nothing."""

    needs_volume = True

    def __init__(self, volume: Volume, trainer: TrainerLink, rules: ManifestRules) -> None:
        self._volume = volume
        self._trainer = trainer
        self._rules = rules

    async def describe(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        """Return the manifest. Only the trainer knows which version is the newest; others are read from the volume."""
        if ref.run_id and ref.version is None:
            manifest = await self._trainer.describe(ref, tenant)
            check_is(manifest, ref, tenant)
            return manifest
        return await asyncio.to_thread(self._read, ref, tenant)

    async def fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        if ref.run_id and not self.holds(ref):
            await self._wait_for(ref, tenant)
        return await asyncio.to_thread(self._fetch, ref, tenant)

    def holds(self, ref: ModelRef) -> bool:
        """Return whether the adapter is on the volume."""
        return (ref.checkpoint != "" or ref.version is not None) and self._directory(ref).is_dir()

    async def _wait_for(self, ref: ModelRef, tenant: str) -> None:
        """Wait for a version that the trainer has published but not yet written to the volume.

        Raises the trainer's error if there is no such version, or no more, TrainerUnavailable if the trainer does not
        answer.
        """
        while True:
            check_is(await self._trainer.describe(ref, tenant), ref, tenant)
            for _ in range(_POLLS):  # a volume that hosts share has no events
                if self.holds(ref):
                    return
                await asyncio.sleep(_POLL_SECONDS)

    def _fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        """Verify the files, all from a single save: a checkpoint may be overwritten at any moment."""
        directory = self._directory(ref)
        while True:
            with self._opened(ref) as pinned:
                try:
                    files = files_of(pinned)
                    manifest = self._manifest(pinned, ref, tenant)
                    self._rules.check(manifest)
                    (verify_model if is_model(manifest) else verify_adapter)(pinned, manifest)
                    if files_of(pinned) == files:
                        return StagedAdapter(manifest, directory, temporary=False, files=files)
                except (FileNotFoundError, errors.ChecksumMismatch) as error:
                    with suppress(FileNotFoundError):
                        if not pinned.samefile(directory):
                            continue  # overwritten meanwhile
                    if isinstance(error, errors.ChecksumMismatch):
                        raise
                    raise absent(ref) from error

    def _read(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        with self._opened(ref) as pinned:
            return self._manifest(pinned, ref, tenant)

    def _manifest(self, directory: Path, ref: ModelRef, tenant: str) -> pb.Manifest:
        manifest = read_manifest(directory)
        check_is(manifest, ref, tenant)
        return manifest

    @contextmanager
    def _opened(self, ref: ModelRef) -> Iterator[Path]:
        try:
            with opened(self._directory(ref)) as directory:
                yield directory
        except (FileNotFoundError, NotADirectoryError) as error:
            run_exists = bool(ref.checkpoint) or self._volume.run(ref.run_id).is_dir()
            raise (absent(ref) if run_exists else foreign(ref)) from error

    def _directory(self, ref: ModelRef) -> Path:
        if ref.checkpoint:
            return self._volume.checkpoint(CheckpointPath.parse(ref.checkpoint, "model.checkpoint"))
        return self._volume.version(ref.run_id, ref.version or 0)

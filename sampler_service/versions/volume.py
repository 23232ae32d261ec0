"""The bridges volume and restart: versions and checkpoints are read where the trainer put them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.layout import CheckpointPath, Volume
from paceline.types import ModelRef
from paceline.weights import is_model, read_manifest, verify_adapter, verify_model
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.versions.bridges import ManifestRules, StagedAdapter, check_is
from sampler_service.versions.keys import absent, foreign
from sampler_service.versions.trainer_link import TrainerLink

_POLL_SECONDS = 0.01
"""Between looks for a version that is being written; the caller bounds the whole wait."""


class VolumeBridge:
    """Reads adapters or whole models from the checkpoint volume; copies nothing."""

    needs_volume = True

    def __init__(self, volume: Volume, trainer: TrainerLink, rules: ManifestRules, name: str = "volume") -> None:
        self.name = name
        self._volume = volume
        self._trainer = trainer
        self._rules = rules

    async def describe(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        """Read the manifest; which version is the newest, only the trainer knows."""
        if ref.run_id and ref.version is None:
            manifest = await self._trainer.describe(ref, tenant)
            check_is(manifest, ref, tenant)
            return manifest
        return await asyncio.to_thread(self._manifest, ref, tenant)

    async def fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        if ref.run_id and not self.holds(ref):
            await self._wait_for(ref, tenant)
        return await asyncio.to_thread(self._fetch, ref, tenant)

    def holds(self, ref: ModelRef) -> bool:
        """Return whether the adapter is on the volume."""
        return (ref.checkpoint != "" or ref.version is not None) and self._directory(ref).is_dir()

    async def _wait_for(self, ref: ModelRef, tenant: str) -> None:
        """Wait for a version that the trainer has published and not yet written here.

        Raises what the trainer answers when there is no such version, TrainerUnavailable when it does not answer.
        """
        check_is(await self._trainer.describe(ref, tenant), ref, tenant)
        while not self.holds(ref):  # noqa: ASYNC110 - a volume that hosts share has no events
            await asyncio.sleep(_POLL_SECONDS)

    def _fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        manifest = self._manifest(ref, tenant)
        self._rules.check(manifest)
        directory = self._directory(ref)
        try:
            (verify_model if is_model(manifest) else verify_adapter)(directory, manifest)
        except FileNotFoundError as error:  # deleted meanwhile
            raise absent(ref) from error
        return StagedAdapter(manifest, directory, temporary=False)

    def _manifest(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        directory = self._directory(ref)
        try:
            manifest = read_manifest(directory)
        except FileNotFoundError as error:
            run_exists = bool(ref.checkpoint) or self._volume.run(ref.run_id).is_dir()
            raise (absent(ref) if run_exists else foreign(ref)) from error
        check_is(manifest, ref, tenant)
        return manifest

    def _directory(self, ref: ModelRef) -> Path:
        if ref.checkpoint:
            return self._volume.checkpoint(CheckpointPath.parse(ref.checkpoint, "model.checkpoint"))
        return self._volume.version(ref.run_id, ref.version or 0)

"""Publish a run's weights as an immutable version: stage it in memory, announce it, then copy it to the volume."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter

from paceline import errors, layout, tracing, weights
from paceline.log import get_logger
from paceline.trainer.v1.trainer_service_pb2 import PublishWeightsResponse
from paceline.types import AdapterGroup, FullParameters, RunParameters, ServedModel
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.protocol import PublishedAs
from trainer_service.failpoints import Failpoints
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard, Reservation
from trainer_service.publish.agreements import Agreements
from trainer_service.publish.process_group import BroadcastGroup
from trainer_service.publish.servable import Obstacle, without_head
from trainer_service.publish.volume_copies import VersionCopy, VolumeCopies
from trainer_service.publish.watch_hub import AckPolicy, WatchHub
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry

_log = get_logger(__name__)

_DAMAGE = (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, errors.ChecksumMismatch)
"""Errors of reading the manifest of a version that is absent or damaged."""
_NUMBERS_RESERVED = 64
"""Version numbers that one write of run.json reserves, so that not every publish waits for the disk."""


class _DiffersError(Exception):
    """A recreated version is not the original."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that was made and announced."""

    manifest: pb.Manifest
    copying: asyncio.Task[None]
    """Its copy to the volume."""
    watchers: Set[str]
    """Names of the samplers that were told of it."""
    begun: float
    """When the publish began, in seconds of `perf_counter`."""
    stage_milliseconds: float


class Publisher:
    """Creates versions and keeps their files as long as they are needed."""

    def __init__(
        self,
        engine: EngineProcess,
        registry: RunRegistry,
        hub: WatchHub,
        volume: layout.Volume,
        staging_root: Path,
        keep_versions: int,
        failpoints: Failpoints,
        group: BroadcastGroup,
        guard: DiskGuard = NO_GUARD,
        agreements: Agreements | None = None,
    ) -> None:
        """`agreements` has whole models scored for comparison with samplers; None to compare none."""
        self._engine = engine
        self._failpoints = failpoints
        self._registry = registry
        self._hub = hub
        self._group = group
        self._volume = volume
        self._guard = guard
        self._agreements = agreements
        # The name is the same after a crash, so that nothing is left behind in memory.
        volume_hash = sha256(str(volume.root.resolve()).encode()).hexdigest()[:16]
        self._staging = staging_root / f"paceline-trainer-{volume_hash}"
        self._keep_versions = keep_versions
        self._copies = VolumeCopies(volume, guard, self._when_copied)
        self._retiring = asyncio.Lock()
        self._manifests: dict[Path, pb.Manifest] = {}
        """Manifests of the staged versions, by directory."""
        self._returning: dict[str, int] = {}
        """For each run whose versions may come back after a crash of the trainer, a number that none of them exceeds.

        Those come back that had not reached the volume. Samplers may serve one of them, so until then no other is
        announced as the newest.
        """

        self.on_missing: Callable[[RunRecord], object] = lambda run: None
        """Called with a run that has to be restored before a version that somebody asks for is there."""

    def start(self) -> None:
        """Create an empty staging directory, and announce the newest version of each run that has it on the volume."""
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(mode=0o700, parents=True)
        self._hub.remember_deleted(self._registry.deleted())
        for run in self._registry:
            run.latest_version = max([run.latest_version, *self._listed(run.run_id)])
            if not run.is_restored:
                self._returning[run.run_id] = _highest_returning(run)
            self._announce_newest(run)

    def all_returned(self, run: RunRecord) -> None:
        """Record that no more versions of a run come back; announce its newest if the one that was expected did not."""
        if self._returning.pop(run.run_id, 0) > self._hub.newest(run.run_id):
            self._announce_newest(run)
            run.latest_version = self._hub.newest(run.run_id) or run.latest_version

    async def stop(self) -> None:
        """Finish writing to the volume and remove the staging directory."""
        await self._copies.stop()
        await asyncio.to_thread(shutil.rmtree, self._staging, ignore_errors=True)

    async def publish(
        self,
        run: RunRecord,
        *,
        seq_id: int,
        durable: bool,
        size: int,
        progress: CommandProgress,
    ) -> Published:
        """Publish the run's current weights as its next version, or reuse the one that `seq_id` made before a crash.

        `size` is the version's number of bytes, which are reserved until its copy to the volume has ended; with
        `durable` the copy waits for nothing. The number is assigned in the command's turn; if the publish fails later,
        it is not used again. Raises NotServable, DiskFull and QuotaExceeded before anything is started.
        """
        reservation = None
        if not self._has_made(run, seq_id):
            self._check_servable(run)
            self._guard.check_free(self._volume.root, size)
            reservation = self._guard.reserve(run.tenant, size)
        try:
            return await self._publish(run, seq_id, reservation, progress, durable=durable)
        except BaseException:
            if reservation is not None:
                reservation.release()
            raise

    async def _publish(
        self, run: RunRecord, seq_id: int, reservation: Reservation | None, progress: CommandProgress, *, durable: bool
    ) -> Published:
        begun = perf_counter()
        version = await self._next_version(run, seq_id)
        run.next_version = version + 1
        if self._agreements is not None and _is_whole(run):
            await self._agreements.score(run, version)
        with run.announcing.enter() as earlier_announced:
            with tracing.span("stage", version=version):
                manifest, directory = await self._stage(run, version, seq_id, progress)
            with tracing.span("wait for earlier versions"):
                await earlier_announced.wait()
            self._failpoints.hit("before_announce")
            run.latest_version = max(run.latest_version, version)
            watchers = self._broadcast(manifest, directory)
        stage_milliseconds = 1e3 * (perf_counter() - begun)
        is_awaited = durable or any(watcher.needs_volume for watcher in self._hub.watchers())
        answered = None if is_awaited or _is_whole(run) else progress.ended
        copying = self._copies.start(VersionCopy(manifest, directory, reservation), answered)
        return Published(manifest, copying, watchers, begun, stage_milliseconds)

    async def confirm(
        self, published: Published, *, durable: bool, policy: AckPolicy, ack_seconds: float
    ) -> PublishWeightsResponse:
        """Wait until a version is on the volume, if it is to be `durable`, and for samplers as `policy` says.

        Raises AckTimeout, the error with which a sampler refused the version, or OSError if the volume did not take
        it; the version exists in each case.
        """
        if durable:
            with tracing.span("wait for the volume"):
                await asyncio.shield(published.copying)
        model = published.manifest.model
        acks: Sequence[pb.Acknowledgement] = ()
        if policy is not AckPolicy.NONE:
            with tracing.span("wait for samplers", policy=policy.name):
                acks = await self._hub.wait((model.run_id, model.version), policy, published.watchers, ack_seconds)
        return PublishWeightsResponse(
            model=model,
            acknowledgements=acks,
            stage_milliseconds=published.stage_milliseconds,
            total_milliseconds=1e3 * (perf_counter() - published.begun),
        )

    def obstacle(self, parameters: RunParameters, modules: Collection[str]) -> Obstacle | None:
        """Return why no watching sampler can serve a run that adapts `modules`; None if one can, or none watches."""
        return self._hub.obstacle(parameters, modules, self._groups())

    def serves_without_head(self, parameters: RunParameters, modules: Collection[str]) -> bool:
        """Return whether a watching sampler can serve a run only without an adapter on the output head."""
        rest = without_head(modules, self._groups())
        return bool(rest) and self.obstacle(parameters, modules) is not None and self.obstacle(parameters, rest) is None

    def _check_servable(self, run: RunRecord) -> None:
        """Refuse a run that no watching sampler can serve, if at least one watches. Raises NotServable."""
        if (found := self.obstacle(run.parameters, run.adapted_modules)) is not None:
            message = f"no watching sampler can serve what the run trains; {found.message}"
            raise errors.NotServable(message, field=found.field)

    def unserved_modules(self) -> Set[str]:
        """Return the modules of the base model on which none of the watching samplers serves an adapter."""
        return self._hub.unserved_modules()

    def _groups(self) -> Sequence[AdapterGroup]:
        certificate = self._engine.describe().certificate
        return certificate.groups if certificate is not None else ()

    def _has_made(self, run: RunRecord, seq_id: int) -> bool:
        """Return whether the version that command `seq_id` publishes is on the volume from before a crash."""
        return self._maker(run, run.next_version) == seq_id

    def skip_version(self, run: RunRecord) -> None:
        """Leave out the number that a publish which failed may have announced before a crash of the trainer."""
        number = run.next_version
        with suppress(OSError):  # the volume may be unreadable, which must not keep the refusal from its caller
            while self._final(run.run_id, number).exists():  # the publish went on to the next number
                number += 1
        run.next_version = number + 1

    async def recreate(self, run: RunRecord, version: int, seq_id: int, blake3: str) -> None:
        """Recreate a version that command `seq_id` published and that is neither staged nor on the volume.

        The run's weights are the same as then; `blake3` is the version's original checksum, empty if unknown.
        """
        exists = self._staged(run.run_id, version) in self._manifests or self._final(run.run_id, version).exists()
        if exists or not self._is_recent(run.run_id, version):
            return
        try:
            manifest, directory = await self._stage(run, version, seq_id, CommandProgress(), original=blake3)
        except _DiffersError:
            _log.error("recreated version differs from the original; dropped", run=run.run_id, version=version)
            return
        if version >= self._returning.get(run.run_id, 0):
            self._broadcast(manifest, directory)
        self._copies.start_if_free(VersionCopy(manifest, directory))

    async def settled(self, run_id: str) -> None:
        """Wait until a run's published versions are on the volume. Raises the error that keeps one from it.

        What the volume did not take before is copied again. Raises DiskFull if the volume is too full for it.
        """
        await self._copies.settled(run_id)

    def find(self, run: RunRecord, version: int | None) -> Path:
        """Return the directory of a version; None means the newest.

        Raises VersionNotFound, or EngineUnavailable while the version may come back with its run.
        """
        number = run.latest_version if version is None else version
        for directory in (self._staged(run.run_id, number), self._final(run.run_id, number)):
            if directory in self._manifests or (directory / layout.MANIFEST_FILE).exists():
                return directory
        if number and run.run_id in self._returning and self._is_recent(run.run_id, number):
            self.on_missing(run)
            raise errors.EngineUnavailable("the run is being restored, and its newest versions with it; try again")
        field = "model.version.version"
        if not run.latest_version:
            raise errors.VersionNotFound.unpublished(field)
        what = f"no version {number}, or no longer kept; {run.latest_version} is the newest"
        raise errors.VersionNotFound.of(what, field)

    def staged_manifest(self, directory: Path) -> pb.Manifest | None:
        """Return the manifest of a staged version; None for a directory on the volume."""
        return self._manifests.get(directory)

    async def cancel_waits(self, run_id: str) -> None:
        """Stop publishes of a run that is about to be deleted from waiting for samplers."""
        await self._hub.cancel_waits(run_id)

    async def forget(self, run: RunRecord) -> None:
        """Drop a run's staged versions and notify the samplers that it was deleted, once nothing is copied any more."""
        await self._copies.forget(run.run_id)  # they would announce the run again
        self._hub.forget_run(run.run_id)
        self._returning.pop(run.run_id, None)
        if self._agreements is not None:
            self._agreements.forget(run.run_id)
        for directory in list(self._manifests):
            if directory.parent.name == run.run_id:
                self._manifests.pop(directory, None)
        await asyncio.to_thread(shutil.rmtree, self._staging / run.run_id, ignore_errors=True)

    def _announce_newest(self, run: RunRecord) -> None:
        """Announce the newest intact version of a run, unless a newer one comes back."""
        for number, is_on_volume in self._existing(run.run_id):
            staged = self._manifests.get(self._staged(run.run_id, number))
            manifest = self._read_intact(run, number) if is_on_volume else staged
            if manifest is None:
                continue
            if number >= self._returning.get(run.run_id, 0):
                self._announce(manifest, on_volume=is_on_volume)
            elif is_on_volume:
                # Samplers stay with what they have until then; those that load from the volume may have nothing.
                self._hub.remember_on_volume(self._announcement(manifest, on_volume=True))
            return

    def _existing(self, run_id: str) -> list[tuple[int, bool]]:
        """Return the numbers of a run's versions, newest first, each with whether it is on the volume."""
        on_volume, staged = set(self._listed(run_id)), set(layout.numbered(self._staging / run_id))
        return [(number, number in on_volume) for number in sorted(on_volume | staged, reverse=True)]

    def _read_intact(self, run: RunRecord, number: int) -> pb.Manifest | None:
        """Read the manifest of a version on the volume; return None if it cannot be read. Set a damaged one aside."""
        directory = self._final(run.run_id, number)
        try:
            manifest = weights.read_manifest(directory)
            if (manifest.model.run_id, manifest.model.version) != (run.run_id, number):
                raise errors.ChecksumMismatch("the manifest belongs to another version")
        except _DAMAGE as error:
            _log.error("version damaged", run=run.run_id, version=number, error=str(error))
            self._set_aside(run, directory)
        except OSError as error:  # may be temporary
            _log.error("version cannot be read", run=run.run_id, version=number, error=str(error))
        else:
            return manifest
        return None

    def _set_aside(self, run: RunRecord, directory: Path) -> None:
        """Set a damaged version aside, or leave it where that fails: it concerns this run alone."""
        try:
            aside = layout.quarantine(directory)
        except OSError as error:
            _log.error("damaged version not set aside", run=run.run_id, path=str(directory), error=str(error))
            return
        run.damage.append(f"{directory.parent.name}/{aside.name}")
        _log.error("damaged version set aside", run=run.run_id, aside=aside.name)

    async def _next_version(self, run: RunRecord, seq_id: int) -> int:
        """Return the version number for the run's current weights: one that no other weights ever had."""
        version = run.next_version
        while (made := self._final(run.run_id, version)).exists():
            if self._maker(run, version) == seq_id and await self._is_current(run, made):
                break
            version += 1
        return version

    def _maker(self, run: RunRecord, version: int) -> int:
        """Return the seq_id of the command that made a version on the volume; 0 if it is absent or damaged."""
        try:
            return int(weights.read_manifest(self._final(run.run_id, version)).seq_id)
        except _DAMAGE:
            return 0

    async def _is_current(self, run: RunRecord, made: Path) -> bool:
        """Return whether a version on the volume holds the run's current weights."""
        known, folder = weights.read_manifest(made), self._directory(run, 0).parent
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        # It never gets a version's name: the next start removes what a crash leaves of it.
        current = Path(await asyncio.to_thread(mkdtemp, prefix=layout.STAGED, dir=folder))
        try:
            await self._engine.save_adapter(run.run_id, current)
            blake3 = await asyncio.to_thread(weights.blake3_of, current / weights.weights_file(known))
        finally:
            await asyncio.to_thread(shutil.rmtree, current)
        return blake3 == known.model.blake3

    async def _stage(
        self,
        run: RunRecord,
        version: int,
        seq_id: int,
        progress: CommandProgress,
        *,
        original: str | None = None,
    ) -> tuple[pb.Manifest, Path]:
        """Create a version's files and manifest; samplers are notified of a new adapter before its checksums exist.

        `original` is the checksum that a recreated version must have, empty if unknown. Raises _DiffersError if it has
        another. Nothing is left if this fails, or what is left is replaced by the next attempt.
        """
        await self._reserve(run, version)
        model, step = ServedModel(run.base_model, run.run_id, version), run.step
        directory, whole = self._directory(run, version), _is_whole(run)
        overwrite = whole or directory not in self._manifests  # without a manifest it is what a failure left
        async with layout.new_directory_async(directory, overwrite=overwrite, durable=whole) as staging:
            # A recreated version may differ from the original: its checksum, not yet known, decides whether it is used.
            published = PublishedAs(run.run_id, version, run.tenant) if original is None else None
            with nullcontext() if whole else _naming_staging_dir():
                await self._engine.save_adapter(run.run_id, staging, progress.capture, published)
            progress.release()
            draft = await asyncio.to_thread(
                weights.draft_manifest,
                staging,
                model,
                tenant=run.tenant,
                step=step,
                seq_id=seq_id,
                base_sha256=run.base_sha256,
            )
            if whole:
                manifest = await asyncio.to_thread(_seal_model, staging, draft)
                _check_original(manifest, original)
        if not whole:
            if original is None:
                staged_path = str(directory / layout.WEIGHTS_FILE)
                trace = tracing.current()
                self._hub.notify_staged(pb.Staged(manifest=draft, staged_path=staged_path, traceparent=trace))
            # The manifest is written to a file when the version is copied to the volume; nobody reads it before that.
            try:
                with tracing.span("hash"):
                    manifest = await asyncio.to_thread(weights.seal, directory, draft)
                _check_original(manifest, original)
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
                raise
            self._manifests[directory] = manifest
        return manifest, directory

    async def _reserve(self, run: RunRecord, version: int) -> None:
        """Note durably that a version number may be in use. Raises DiskFull."""
        async with run.reserving:
            before = run.version_limit
            if version <= before:
                return
            run.version_limit = version + _NUMBERS_RESERVED
            try:
                await self._registry.persist(run)
            except BaseException:
                run.version_limit = before
                raise

    async def _when_copied(self, copy: VersionCopy) -> None:
        """Announce a version that is on the volume now, and remove what it makes superfluous."""
        if copy.directory.is_relative_to(self._staging):
            self._announce(copy.manifest, on_volume=True)
        await self._retire(copy.run_id)

    async def _retire(self, run_id: str) -> None:
        """Remove the versions that newer ones make superfluous; leave what cannot be removed to the next call.

        Calls take turns, because versions that are copied at the same time find the same older ones.
        """
        async with self._retiring:
            try:
                removed = await asyncio.to_thread(self._remove_superfluous, run_id, self._hub.leased())
            except OSError as error:
                _log.warning("older versions not removed", run=run_id, error=str(error))
            else:
                for version in removed:
                    self._copies.drop(run_id, version)

    def _remove_superfluous(self, run_id: str, leased: Set[tuple[str, int]]) -> list[int]:
        """Remove staged versions that are on the volume with a newer one, and versions there that nobody needs.

        Returns the latter.
        """
        on_volume = sorted(self._on_volume(run_id), reverse=True)
        for version in on_volume[1:]:
            staged = self._staged(run_id, version)
            self._manifests.pop(staged, None)
            shutil.rmtree(staged, ignore_errors=True)  # the run may be deleted meanwhile
        superfluous = [version for version in on_volume[self._keep_versions :] if (run_id, version) not in leased]
        for version in superfluous:
            final = self._final(run_id, version)
            with suppress(FileNotFoundError):
                layout.remove_directory(final)
            self._guard.measure(final)
            self._hub.forget_version((run_id, version))
        return superfluous

    def _staged(self, run_id: str, version: int) -> Path:
        return self._staging / run_id / str(version)

    def _final(self, run_id: str, version: int) -> Path:
        return self._volume.version(run_id, version)

    def _directory(self, run: RunRecord, version: int) -> Path:
        """Return where a version is created: in the staging directory, or on the volume if it is a whole model."""
        return self._final(run.run_id, version) if _is_whole(run) else self._staged(run.run_id, version)

    def _listed(self, run_id: str) -> list[int]:
        """Return the numbers of a run's versions on the volume; none if they cannot be listed."""
        try:
            return self._on_volume(run_id)
        except OSError as error:  # it keeps no other run from its versions
            _log.error("versions cannot be listed", run=run_id, error=str(error))
            return []

    def _on_volume(self, run_id: str) -> list[int]:
        """Return the numbers of a run's versions on the volume."""
        return layout.numbered(self._final(run_id, 0).parent)

    def _is_recent(self, run_id: str, version: int) -> bool:
        """Return whether a version is among the newest of its run, which are kept, or newer than all on the volume."""
        return version > max(self._on_volume(run_id), default=0) - self._keep_versions

    def _broadcast(self, manifest: pb.Manifest, directory: Path) -> Set[str]:
        """Broadcast a new version and announce it; a whole model is already on the volume."""
        # There is no await between the two, so that members receive files in the order of the announcements.
        generation = self._group.send(manifest, directory)
        is_staged = directory.is_relative_to(self._staging)
        return self._announce(manifest, on_volume=not is_staged, generation=generation)

    def _announce(self, manifest: pb.Manifest, *, on_volume: bool, generation: int = 0) -> Set[str]:
        """Announce a version and which one is the newest; return the names of the watchers."""
        return self._hub.announce(self._announcement(manifest, on_volume=on_volume, generation=generation))

    def _announcement(self, manifest: pb.Manifest, *, on_volume: bool, generation: int = 0) -> pb.Announcement:
        model = manifest.model
        newest = max(model.version, self._hub.newest(model.run_id), self._returning.get(model.run_id, 0))
        announcement = pb.Announcement(
            manifest=manifest,
            broadcast_generation=generation,
            newest_version=newest,
            traceparent=tracing.current(),
        )
        if on_volume:
            final = self._final(model.run_id, model.version)
            announcement.volume_path = str(final.relative_to(self._volume.root))
        return announcement


def _highest_returning(run: RunRecord) -> int:
    """Return a number that no version exceeds which the run's journal brings back."""
    # A publish without an answer may have announced its version before the crash, under any number that was reserved.
    return max(run.latest_version, run.version_limit) if run.sequencer.must_publish else run.latest_version


def _check_original(manifest: pb.Manifest, original: str | None) -> None:
    if original not in {None, "", manifest.model.blake3}:
        raise _DiffersError


@contextmanager
def _naming_staging_dir() -> Iterator[None]:
    """Make DiskFull name the staging directory instead of the checkpoint volume."""
    try:
        yield
    except errors.DiskFull as error:
        message = "the trainer's staging_dir is full; give it more space, or set another, and publish again"
        raise errors.DiskFull(message) from error


def _seal_model(directory: Path, draft: pb.Manifest) -> pb.Manifest:
    """Write the manifest and checksums of a whole model into its directory."""
    manifest = weights.seal(directory, draft)
    weights.write_manifest(directory, manifest)
    weights.write_sums(directory, manifest, weights.Sums.BLAKE3)
    return manifest


def _is_whole(run: RunRecord) -> bool:
    """Return whether a run's versions are whole models."""
    return isinstance(run.parameters, FullParameters)

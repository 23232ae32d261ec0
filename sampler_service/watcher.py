"""Follows the trainer: loads versions as they are announced, and acknowledges or refuses them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from time import perf_counter
from uuid import uuid4

import grpc

from paceline import errors, tracing
from paceline.background import Background
from paceline.cancellation import keep_cancellation
from paceline.log import get_logger
from paceline.rpc.status import error_from_rpc
from paceline.types import ModelInfo, ServedModel
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.agreement import AgreementStatus
from sampler_service.engine.options import Serves
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import VersionResolver, Versions
from sampler_service.stores.version import Version
from sampler_service.transports.base import VersionKey
from sampler_service.transports.collective import GroupReceiver
from sampler_service.transports.stream import Offer, Offers
from sampler_service.transports.trainer_link import TrainerLink

_FIRST_DELAY, _LAST_DELAY = 0.1, 2.0
"""Seconds between attempts to reach the trainer: doubled each time, with jitter."""

_FIRST_RETRY, _LAST_RETRY = 0.2, 5.0
"""Seconds between attempts to load a version for which no slot is free: doubled each time."""

_CONCURRENT_LOADS = 4
"""Most announced versions loaded at a time: a trainer that restarts announces every run at once."""

_log = get_logger(__name__)
Outbox = asyncio.Queue[pb.WatchVersionsRequest | None]
"""Messages to send on a watch; None ends it."""


class VersionWatcher:
    """Keeps a watch on the trainer open. Loaded versions outlive the trainer and are listed in each hello."""

    def __init__(
        self,
        trainer: TrainerLink,
        registry: Versions,
        resolver: VersionResolver,
        sampler_id: str,
        model: ModelInfo,
        agreement: AgreementStatus,
        metrics: SamplerMetrics,
        *,
        serves: Serves,
        needs_volume: bool,
        offers: Offers | None,
        group: GroupReceiver | None,
    ) -> None:
        """`offers` is None if the bridge does not prefetch, `group` is None unless the bridge is collective."""
        self._trainer = trainer
        self._registry = registry
        self._resolver = resolver
        self._sampler_id = sampler_id
        self._instance = uuid4().hex
        self._model = model
        self._agreement = agreement
        self._metrics = metrics
        self._serves = serves
        self._needs_volume = needs_volume
        self._offers = offers
        self._group = group
        self._outbox: Outbox | None = None
        self._applying = Background("version not applied")
        self._awaited: set[VersionKey] = set()
        """Versions announced but not yet acknowledged or refused."""
        self._slots = asyncio.Semaphore(_CONCURRENT_LOADS)
        registry.listeners.loaded.append(self._loaded)
        registry.listeners.released.append(self._release)

    async def run(self) -> None:
        """Watch until cancelled."""
        delay = _FIRST_DELAY
        try:
            while True:
                start = perf_counter()
                reason = await self._watch()
                if perf_counter() - start > _LAST_DELAY:
                    delay = _FIRST_DELAY
                _log.warning("watch ended; reconnecting", reason=reason, seconds=delay)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter is no secret
                delay = min(2 * delay, _LAST_DELAY)
        finally:
            await self._applying.close()

    async def _watch(self) -> str:
        """Watch once; return why it ended."""
        outbox = self._outbox = Outbox()
        self._send(pb.WatchVersionsRequest(hello=self._hello()))
        call = self._trainer.watch(_drain(outbox))
        try:
            with keep_cancellation():
                async for message in call:
                    self._hear(message)
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            if isinstance(error, errors.BaseMismatch):
                await self._agreement.note_hello(refusal=error.message)
            told = isinstance(error, errors.Conflict | errors.BaseMismatch)
            return f"{error.reason}: {error.message}" if told else failure.code().name
        finally:
            self._metrics.watching.set(0)
            self._outbox = None
            if self._offers is not None:
                self._offers.clear()
            if self._group is not None:
                self._group.leave()
            call.cancel()
            outbox.put_nowait(None)  # a broken call leaves its reader of the outbox waiting
        return "closed by the trainer"

    def _hello(self) -> pb.Hello:
        held = [served for served in self._registry.held() if served.version]
        return pb.Hello(
            sampler_id=self._sampler_id,
            held=[
                pb.HeldVersion(
                    run_id=served.run_id,
                    version=served.version,
                    blake3=served.blake3,
                    newest=served.version == self._resolver.newest(served.run_id),
                )
                for served in held
            ],
            joins_group=self._group is not None,
            links_staged=self._offers is not None,
            instance=self._instance,
            base_model=self._model.name,
            base_sha256=self._model.weights_sha256,
            needs_volume=self._needs_volume,
            serves=self._serves,
            max_lora_rank=self._model.max_lora_rank,
            unserved_modules=self._model.unserved_modules,
        )

    def _hear(self, message: pb.WatchVersionsResponse) -> None:
        match message.WhichOneof("message"):
            case "announcement":
                self._announced(message.announcement)
            case "welcome":
                self._metrics.watching.set(1)
                self._resolver.welcomed(
                    message.welcome.trainer_instance, set(map(VersionKey.of, self._registry.held()))
                )
                self._applying.spawn(self._agreement.note_hello())
            case "probe":
                self._applying.spawn(self._measure(message.probe))
            case "run_deleted":
                self._resolver.forget(message.run_deleted.run_id)
                self._registry.forget_run(message.run_deleted.run_id)
                self._agreement.forget_run(message.run_deleted.run_id)
                if self._offers is not None:
                    self._offers.drop(message.run_deleted.run_id)
                if self._group is not None:
                    self._group.forget_run(message.run_deleted.run_id)
            case "staged" if self._offers is not None:
                with tracing.continued(message.staged.traceparent):
                    self._applying.spawn(self._prepare(self._offers.expect(message.staged)))
            case "group" if self._group is not None:
                self._group.join(message.group, self._send)
            case other:
                _log.warning("unknown message on the watch", message=other)

    def _announced(self, announcement: pb.Announcement) -> None:
        """Start to load an announced version if it can be fetched and is not superseded."""
        model, on_volume, arrival = announcement.manifest.model, bool(announcement.volume_path), perf_counter()
        key = VersionKey(model.run_id, model.version)
        self._registry.displace(key, model.blake3)
        if self._offers is not None:
            self._offers.announced(key, announcement.manifest)
        if self._group is not None and announcement.broadcast_generation:
            self._group.expect(key, announcement)
        if self._needs_volume and not on_volume:
            return
        newest = announcement.newest_version or key.version
        if self._needs_volume and not self._resolver.newest(key.run_id):
            newest = key.version  # whatever is newer is not on the volume
        is_newer = self._resolver.announced(key.run_id, key.version, newest)
        # A version is announced again when it reaches the volume. By then a streamed one may already be superseded.
        if is_newer or not on_volume or self._needs_volume:
            self._awaited.add(key)
            with tracing.continued(announcement.traceparent):
                self._applying.spawn(self._apply(key, model.blake3, arrival))

    async def _measure(self, probe: pb.Probe) -> None:
        agreement = await self._agreement.measure(probe)
        if agreement is not None:
            self._send(pb.WatchVersionsRequest(agreement=agreement))

    async def _prepare(self, offer: Offer) -> None:
        """Load a staged version before it is announced, so that then only its checksum must be awaited.

        With 8 streams on a CPU a version is active 2.7 times as early (97 instead of 259 ms;
        bench/results/publishing.md).
        """
        try:
            with tracing.span("prepare version", **_named(offer.key, self._sampler_id)):
                async with self._slots:
                    if not offer.is_dropped:
                        await self._find_or_fetch(offer.key)
        except errors.PacelineError as error:
            # Not refused: its announcement starts another attempt, which is refused if it fails.
            _log.info("version not prepared", run=offer.key.run_id, version=offer.key.version, reason=error.reason)

    async def _apply(self, key: VersionKey, blake3: str, arrival: float) -> None:
        try:
            with tracing.span("activate version", **_named(key, self._sampler_id)):
                entry = await self._load(key, blake3)
        except errors.PacelineError as error:
            self._refuse(key, error)
        except Exception:
            _log.exception("version not loaded", run=key.run_id, version=key.version)
            self._refuse(key, errors.Internal("the version could not be loaded; see the sampler's log"))
        else:
            seconds = perf_counter() - arrival
            if not entry.is_announced:
                self._metrics.apply_seconds.observe(seconds)
            entry.is_announced = True
            self._acknowledge(entry, 1e3 * seconds)
            self._registry.retire_superseded(key.run_id)
        finally:
            self._awaited.discard(key)
            if self._group is not None:
                self._group.drop(key)

    async def _load(self, key: VersionKey, blake3: str) -> Version:
        """Load an announced version. If no slot is free, send a temporary refusal and retry.

        Raises EngineUnavailable if a newer version arrives before a slot is free, and as `_exactly`.
        """
        delay = _FIRST_RETRY
        while True:
            try:
                async with self._slots:
                    return await self._exactly(key, blake3)
            except errors.Exhausted as error:
                if key.version < self._resolver.last_announced(key.run_id):
                    message = "a newer version came before a slot was free for this one"
                    raise errors.EngineUnavailable(message) from error
                self._refuse(key, error, pending=True)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)

    async def _exactly(self, key: VersionKey, blake3: str) -> Version:
        """Load exactly the announced content, not other content under its number. Raises ChecksumMismatch.

        What was in transit at the announcement may be older content: a shared fetch, or a version on its way to disk.
        """
        received = ""
        for _ in range(3):
            try:
                entry = await self._find_or_fetch(key)
            except errors.VersionExists:
                _log.info("older content in the way of a version", run=key.run_id, version=key.version)
            else:
                received = entry.served.blake3
                if received == blake3:
                    return entry
            self._registry.displace(key, blake3)
        message = f"received bytes with BLAKE3 {received or 'that differ each time'}; {blake3} was announced"
        raise errors.ChecksumMismatch(message, field="model.blake3")

    async def _find_or_fetch(self, key: VersionKey) -> Version:
        return self._registry.find(key) or await self._registry.fetch(key)

    def _loaded(self, entry: Version) -> None:
        """Also acknowledge a version that was pushed or requested, so that the trainer keeps it while it is held."""
        if entry.served.version and entry.key not in self._awaited:
            times = entry.times
            self._acknowledge(entry, times.step_wait_milliseconds + times.apply_milliseconds)

    def _acknowledge(self, entry: Version, milliseconds: float) -> None:
        acknowledgement = acknowledge(entry, self._sampler_id, milliseconds)
        acknowledgement.run_refused = self._agreement.refuses_run(entry.served.run_id)
        self._send(pb.WatchVersionsRequest(acknowledgement=acknowledgement))

    def _refuse(self, key: VersionKey, error: errors.PacelineError, *, pending: bool = False) -> None:
        """Tell the trainer that a version is not loaded: permanently or, with `pending`, temporarily."""
        run_id, version, reason, message = key.run_id, key.version, error.reason, str(error)
        _log.warning("version refused", run=run_id, version=version, reason=reason, error=message, pending=pending)
        refusal = pb.Refusal(run_id=run_id, version=version, reason=reason, message=message, pending=pending)
        self._send(pb.WatchVersionsRequest(refusal=refusal))

    def _release(self, served: ServedModel) -> None:
        if served.version:
            held = pb.HeldVersion(run_id=served.run_id, version=served.version)
            self._send(pb.WatchVersionsRequest(release=held))

    def _send(self, message: pb.WatchVersionsRequest) -> None:
        """Send a message to the trainer. While there is no watch it is dropped: the next hello lists what is held."""
        if self._outbox is not None:
            self._outbox.put_nowait(message)


def acknowledge(entry: Version, sampler_id: str, milliseconds: float) -> pb.Acknowledgement:
    """Build the acknowledgement of an active version, with the checksum of the bytes that this sampler serves."""
    return pb.Acknowledgement(
        run_id=entry.served.run_id,
        version=entry.served.version,
        blake3=entry.served.blake3,
        sampler_id=sampler_id,
        milliseconds=milliseconds,
        step_wait_milliseconds=entry.times.step_wait_milliseconds,
        apply_milliseconds=entry.times.apply_milliseconds,
    )


def _named(key: VersionKey, sampler_id: str) -> dict[str, str | int]:
    """Return the attributes of a span about a version."""
    return {"run": key.run_id, "version": key.version, "sampler": sampler_id}


async def _drain(outbox: Outbox) -> AsyncIterator[pb.WatchVersionsRequest]:
    while (message := await outbox.get()) is not None:
        yield message

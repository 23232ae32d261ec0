"""Store for the versions of one full-parameter run, each written over the previous one in the engine's own weights.

With the bridge `shared`, the trainer's engine writes them under a lock that `UpdateServer` gives it.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from time import perf_counter

import msgspec

from paceline import errors
from paceline.base_model.weight_sharing import SOCKET, WriteReply, WriteRequest, decode_request
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from paceline.weights import absent
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.engine.protocol import Adapter, LoadTimes, WritableEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import Lease, SharedFetches, SingleModelStore, VersionResolver
from sampler_service.stores.version import Version
from sampler_service.transports.base import Bridge, StagedAdapter, VersionKey, arriving_within, check_owner

_DRAIN_SECONDS = 45.0
"""How long the first write waits for requests to the base model to end; less than a writer waits for its turn."""

_WRITE_SECONDS = 60.0
"""Longest duration of a write by the trainer; a stopped writer would block every request."""

_log = get_logger(__name__)


class SlotState(Enum):
    """Whose the engine's weights are."""

    BASE = auto()
    """The base model's."""
    WRITING = auto()
    """Nobody's: a write is in progress, or was interrupted. No request starts before a complete one."""
    SERVING = auto()
    """Those of a run's version."""
    UNUSED = auto()
    """Nobody's: other content has the version's number, or its run was deleted. A run may write its own."""


_MOVES: Mapping[SlotState, Set[SlotState]] = {
    SlotState.BASE: {SlotState.WRITING},
    SlotState.WRITING: {SlotState.WRITING, SlotState.SERVING, SlotState.UNUSED},
    SlotState.SERVING: {SlotState.WRITING, SlotState.UNUSED},
    SlotState.UNUSED: {SlotState.WRITING},
}
"""The moves that are permitted, from each state."""


class InPlaceSlot(SingleModelStore):
    """Implements Versions for an engine whose weights are written in place.

    The base model is served until a run writes its first version; from then on the weights belong to this run, until it
    is deleted. Requests continue across a write with the newer weights; the engine records which version each token is
    of. After an interrupted write no request starts until a complete write succeeds.
    """

    def __init__(
        self,
        engine: WritableEngine,
        bridge: Bridge,
        resolver: VersionResolver,
        base_model: str,
        fetch_timeout_seconds: float,
        metrics: SamplerMetrics,
    ) -> None:
        """`bridge` fetches versions that the trainer did not write itself."""
        super().__init__()
        self._engine = engine
        self._bridge = bridge
        self._resolver = resolver
        self._base = ServedModel(base_model)
        self._fetch_timeout = fetch_timeout_seconds
        self._metrics = metrics
        self._fetches: SharedFetches[None] = SharedFetches()
        self._state = SlotState.BASE
        self._changing = asyncio.Lock()

    def __iter__(self) -> Iterator[Version]:
        """Yield the served version once its manifest is known; before that it is not reported to the trainer."""
        return iter([self._entry] if self._entry and self._entry.served.blake3 else [])

    def serves(self, ref: ModelRef) -> bool:
        if ref.is_base:
            return self._state is SlotState.BASE
        return self.find(VersionKey(ref.run_id, ref.version or 0)) is not None

    def find(self, key: VersionKey) -> Version | None:
        """Return the version if it is the served one and its manifest is known."""
        return next((entry for entry in self if entry.key == key), None)

    @asynccontextmanager
    async def lease(self, ref: ModelRef, tenant: str) -> AsyncIterator[Lease]:
        """Admit a request.

        Raises ModelNotFound if the base model was overwritten, VersionNotFound if the version was, EngineUnavailable
        after an interrupted write, Unsupported for a checkpoint, and as `fetch`.
        """
        lease = await self._enter(ref, tenant)
        with ExitStack() as resources:
            resources.callback(self._end_use)
            yield replace(lease, release=resources.close)

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> Version:
        """Return an announced version; if the trainer did not write it, it is written from the volume.

        While no run owns the weights, as after a restart, only a request can load a version, not an announcement: then
        this raises EngineUnavailable, as it does for a version that a newer one overtook. Raises Unsupported for a
        version of another run.
        """
        if self._entry is None:
            raise errors.EngineUnavailable("it is loaded when a request asks for it")
        return await self._bring(key, tenant)

    async def _bring(self, key: VersionKey, tenant: str) -> Version:
        if key.checkpoint:
            raise errors.Unsupported("this sampler serves one run's weights and no checkpoints", field="model")
        if not self._holds(key):
            async with arriving_within(self._fetch_timeout):
                await self._fetches.join(key, tenant, lambda: self._load(key, tenant))
        entry = self._entry
        if entry is None or entry.key != key:
            raise errors.EngineUnavailable("a newer version came before this one was loaded")
        entry.staged = StagedAdapter(await self._bridge.describe(key.ref(), tenant), Path(), temporary=False)
        return entry

    async def _load(self, key: VersionKey, tenant: str) -> None:
        staged = await self._bridge.fetch(key.ref(), tenant)
        async with self.writing(WriteRequest("", key.run_id, key.version, staged.manifest.tenant)):
            await self._engine.write_weights(staged.directory)
            await staged.verified()

    def displace(self, key: VersionKey, blake3: str) -> None:
        """Displace other content under the same number. The BLAKE3 of a version just written is not known yet."""
        entry = self._entry
        if entry is not None and entry.key == key and entry.served.blake3 not in {"", blake3}:
            _log.warning("weights displaced", run=key.run_id, version=key.version, announced=blake3)
            self._give_up()

    def forget_run(self, run_id: str) -> None:
        self.arrivals.forget_run(run_id)
        if self._entry is not None and self._entry.served.run_id == run_id:
            self._give_up()

    def revived(self, lost: Sequence[Adapter]) -> None:
        """Do nothing: an engine whose weights are lent for writing is never restarted within the service."""

    async def close(self) -> None:
        await self._fetches.close()

    @asynccontextmanager
    async def writing(self, request: WriteRequest) -> AsyncIterator[None]:
        """Hold the turn to write the weights while the block runs; when it ends, the version is served.

        Raises Unsupported if the weights belong to another run, Overloaded if requests to the base model do not end,
        EngineUnavailable if a newer version is already served, RunNotFound if the run is deleted meanwhile.
        """
        arrival = self.arrivals.expect(request.run_id)
        async with self._changing:
            start = perf_counter()
            await self._take_over(request)
            await self._engine.begin_write(request.version)
            # If the block raises, the write stays interrupted: without `end_write` a paused engine stays paused.
            self._move(SlotState.WRITING)
            begun = perf_counter()
            yield
            times = LoadTimes(1e3 * (begun - start), 1e3 * (perf_counter() - begun))
            await self._engine.end_write(request.version)
            self._release_entry()
            self._move(SlotState.UNUSED if arrival.is_deleted else SlotState.SERVING)
            arrival.check()
            self._serve(request, times)

    async def _take_over(self, request: WriteRequest) -> None:
        """Check that the writer may change the weights; for a run's first version, wait for earlier requests to end."""
        if self._entry is not None:
            served = self._entry.served
            if served.run_id != request.run_id:
                raise errors.Unsupported("the weights belong to another run; give each run a sampler of its own")
            if served.version > request.version:
                raise errors.EngineUnavailable("a newer version came before this one was written")
            return
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self._idle.wait()
        except TimeoutError as error:
            raise errors.Overloaded("requests to the previous weights are still running; publish again") from error

    def _serve(self, request: WriteRequest, times: LoadTimes) -> None:
        manifest = pb.Manifest(tenant=request.tenant)  # the rest is asked of the trainer when it has announced it
        manifest.model.base_model = self._base.base_model
        manifest.model.run_id, manifest.model.version = request.run_id, request.version
        adapter = Adapter(request.version, f"{request.run_id}/{request.version}", Path())
        self._activate(StagedAdapter(manifest, Path(), temporary=False), adapter, times)
        self._metrics.observe_load(times)
        _log.info("weights written", run=request.run_id, version=request.version, milliseconds=times.apply_milliseconds)

    async def _enter(self, ref: ModelRef, tenant: str) -> Lease:
        while True:
            # Requests that wait here for a write start with the new weights.
            async with self._changing:
                served = self._check(ref, tenant)
                if served is not None:
                    return self._begin(served)
            await self._bring(await self._resolver.resolve(ref, tenant), tenant)

    def _begin(self, served: ServedModel) -> Lease:
        entry = self._entry
        self._begin_use()
        return Lease(served, is_current=lambda: self._entry is entry and self._state is not SlotState.WRITING)

    def _check(self, ref: ModelRef, tenant: str) -> ServedModel | None:
        """Return the model that a request gets; None if its weights are not loaded, or not yet."""
        entry = self._entry
        if self._state is SlotState.WRITING:  # an interrupted write: `_changing` is locked during one in progress
            raise errors.EngineUnavailable("a write of the weights was interrupted; the next publish writes them again")
        if ref.is_base:
            if self._state is not SlotState.BASE:
                raise errors.ModelNotFound(
                    "a run's weights were written over the base model's; name that run", field="model"
                )
            return self._base
        if entry is not None and entry.served.run_id == ref.run_id:
            check_owner(entry.tenant, ref, tenant)
            if ref.version in {None, entry.served.version}:
                return entry.served
            if (ref.version or 0) < entry.served.version:
                raise absent(ref)
        return None

    def _holds(self, key: VersionKey) -> bool:
        """Return whether a version, or a newer one of the same run, is served."""
        entry = self._entry
        return (
            entry is not None
            and self._state is SlotState.SERVING
            and entry.served.run_id == key.run_id
            and entry.served.version >= key.version
        )

    def _give_up(self) -> None:
        """Let nobody use the version any more. Weights that are being written, or were in part, are nobody's anyway."""
        if self._state is SlotState.SERVING:
            self._move(SlotState.UNUSED)
        self._release_entry()

    def _move(self, state: SlotState) -> None:
        if state not in _MOVES[self._state]:
            raise RuntimeError(f"the weights cannot go from {self._state.name} to {state.name}")
        self._state = state


class UpdateServer:
    """Serves writers one at a time; a connection that closes early is an interrupted write."""

    def __init__(self, slot: InPlaceSlot, directory: Path, generation: str) -> None:
        """Listen in `directory`, beside the weights; accept only writers of this `generation`."""
        self._slot = slot
        self._path = directory / SOCKET
        self._generation = generation
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            request = decode_request(await reader.readline())
            if request.generation != self._generation:
                raise errors.BaseUnavailable("the weights were replaced; they are not those that the writer was lent")
            async with self._slot.writing(request):
                _answer(writer, WriteReply())
                async with asyncio.timeout(_WRITE_SECONDS):
                    if not await reader.readline():
                        raise ConnectionError("the writer died")
            _answer(writer, WriteReply())
        except errors.PacelineError as error:
            _log.warning("write refused", reason=error.reason, error=error.message)
            _answer(writer, WriteReply(error.reason, error.message))
        except Exception:  # always answer: the writer must not mistake silence for its turn
            _log.exception("write interrupted; no request starts until the weights are written again")
            _answer(writer, WriteReply(errors.EngineUnavailable.reason, "the write was interrupted"))
        finally:
            writer.close()


def _answer(writer: StreamWriter, reply: WriteReply) -> None:
    writer.write(msgspec.json.encode(reply) + b"\n")

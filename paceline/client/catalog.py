"""Queries and management of models, runs and checkpoints, and downloads of checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc

from paceline import codec, errors
from paceline.client.batching import render_all, sendable
from paceline.client.metrics import MetricsStream, read_metrics, read_rollouts
from paceline.client.results import Account, ServerCapabilities, capabilities_from_proto, path_of
from paceline.client.transport import Connected, Transport, blocking, read
from paceline.client.uploads import upload
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.layout import CONFIG_FILE, MANIFEST_FILE, CheckpointPath
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, CheckpointKind, Datum, Run
from paceline.types.metrics import Metrics, RolloutRow
from paceline.types.reprs import Listing
from paceline.types.training import is_iterable
from paceline.weights.manifest import Sums, is_model, read_manifest, read_sums, weights_file

_PAGE_SIZE = 1000


class Catalog(Connected):
    """Methods that list, describe and delete server-side objects."""

    async def get_server_capabilities_async(self) -> ServerCapabilities:
        """Return what can be trained and sampled."""
        method = self.transport.gateway.GetCapabilities
        return capabilities_from_proto(await self.transport.query(method, gateway_pb.GetCapabilitiesRequest()))

    get_server_capabilities = blocking(get_server_capabilities_async)

    async def whoami_async(self) -> Account:
        """Return the account of the API key: its tenant, the key's name, and the tenant's quotas."""
        reply = await self.transport.query(self.transport.gateway.WhoAmI, gateway_pb.WhoAmIRequest())
        return Account(reply.tenant, reply.key_name, tuple(map(codec.quota_from_proto, reply.quotas)))

    whoami = blocking(whoami_async)

    async def render_conversations_async(
        self, conversations: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]], base_model: str = ""
    ) -> list[list[Datum]]:
        """Render conversations with the model's chat template; return the datums of each, for cross_entropy.

        A conversation is a list of messages as in OpenAI's chat API, or a dict with `messages` and, if the template
        supports them, `tools` and `chat_template_kwargs` (variables such as enable_thinking). The loss covers only the
        assistant's responses, except those with `weight` 0, each after the prompt that is served for it and up to the
        token that ends it. Reasoning is in `reasoning`. A field that the template does not write is refused. An empty
        `base_model` means the served one. Errors: InvalidArgument, UnknownField, SequenceTooLong, OutOfRange,
        Unsupported, EmptyBatch, ModelNotFound.
        """
        if not is_iterable(conversations):
            raise errors.InvalidArgument.of_type(conversations, "a list of conversations", "conversations")
        with sendable("conversations"):
            bodies = [json.dumps(_as_object(conversation)).encode() for conversation in conversations]

        async def call(request: pb.RenderConversationsRequest) -> pb.RenderConversationsResponse:
            rendering = self.transport.call(self.transport.trainer.RenderConversations, request, "training")
            return await self.transport.submit(rendering)

        return [
            [codec.datum_from_proto(datum, "conversations") for datum in rendered.data]
            async for rendered in render_all(call, bodies, base_model)
        ]

    render_conversations = blocking(render_conversations_async)

    async def list_runs_async(self) -> list[Run]:
        """List all runs, newest first."""
        runs: Listing[Run] = Listing()
        request = pb.ListRunsRequest(page_size=_PAGE_SIZE)
        while True:
            page = await self.transport.query(self.transport.trainer.ListRuns, request)
            runs += [codec.run_from_proto(run) for run in page.runs]
            if not page.next_page_token:
                return runs
            request.page_token = page.next_page_token

    list_runs = blocking(list_runs_async)

    async def get_run_async(self, run_id: str) -> Run:
        """Return a run. Errors: RunNotFound.

        run_id: id of the run, as in `Run.run_id`.
        """
        reply = await self.transport.query(self.transport.trainer.GetRun, codec.make(pb.GetRunRequest, run_id=run_id))
        return codec.run_from_proto(reply.run)

    get_run = blocking(get_run_async)

    async def update_run_async(
        self, run_id: str, entries: Mapping[str, str] | None = None, remove: Sequence[str] = ()
    ) -> Run:
        """Set and remove entries of a run's user_metadata, and return the run; the entry `name` names it.

        Errors: RunNotFound, OutOfRange, InvalidArgument (an entry is both set and removed), DiskFull.

        run_id: id of the run, as in `Run.run_id`.
        """
        request = codec.make(pb.UpdateRunRequest, run_id=run_id, set=dict(entries or {}), remove=list(remove))
        reply = await self.transport.query(self.transport.trainer.UpdateRun, request)
        return codec.run_from_proto(reply.run)

    update_run = blocking(update_run_async)

    async def delete_run_async(self, run_id: str, *, delete_checkpoints: bool = False) -> None:
        """Delete a run and its versions, and with `delete_checkpoints` its checkpoints.

        Waits for the run's command in progress. Errors: RunNotFound.

        run_id: id of the run, as in `Run.run_id`.
        """
        request = codec.make(pb.DeleteRunRequest, run_id=run_id, delete_checkpoints=delete_checkpoints)
        call = self.transport.call(self.transport.trainer.DeleteRun, request, "training")
        await self.transport.submit(call)

    delete_run = blocking(delete_run_async)

    async def metrics_async(
        self, run_id: str, names: Sequence[str] = (), *, at_most_points: int | None = None
    ) -> Metrics:
        """Return what was measured of a run: the trainer's values (docs/metrics.md) and those that clients logged.

        With `names` only these values, and only rows that have one. `at_most_points` thins the rows evenly to at most
        so many, the first and the last among them; for a curve, name its value too. Errors: RunNotFound, OutOfRange.

        run_id: id of the run, as in `Run.run_id`.
        """
        return await self.transport.submit(read_metrics(self.transport, run_id, names, at_most_points))

    metrics = blocking(metrics_async)

    def watch_metrics(self, run_id: str, *, after: int = 0) -> MetricsStream:
        """Return an iterator over a run's rows after a number: those that are there, then each as it is written.

        Makes no call itself. Errors: RunNotFound, OutOfRange.

        run_id: id of the run, as in `Run.run_id`.
        """
        return MetricsStream(self.transport, run_id, after)

    async def rollouts_async(self, run_id: str, step: int | None = None, *, limit: int = 100) -> list[RolloutRow]:
        """Return the newest rollouts of a run, newest first, of one step or of all. Errors: RunNotFound, OutOfRange.

        run_id: id of the run, as in `Run.run_id`.
        limit: how many to return at most.
        """
        return await self.transport.submit(read_rollouts(self.transport, run_id, step, limit))

    rollouts = blocking(rollouts_async)

    async def list_checkpoints_async(self, run_id: str = "", kind: CheckpointKind | None = None) -> list[Checkpoint]:
        """List checkpoints, newest first, of one run or all runs, of one kind or both. Errors: RunNotFound.

        run_id: id of a run; empty is all runs.
        """
        checkpoints: Listing[Checkpoint] = Listing()
        if not isinstance(kind, CheckpointKind | None):
            raise errors.InvalidArgument.of_type(kind, "CheckpointKind.STATE or CheckpointKind.SAMPLER", "kind")
        request = codec.make(pb.ListCheckpointsRequest, run_id=run_id, page_size=_PAGE_SIZE)
        if kind is not None:
            request.kind = pb.CheckpointKind.ValueType(kind.value)
        while True:
            page = await self.transport.query(self.transport.trainer.ListCheckpoints, request)
            checkpoints += [codec.checkpoint_from_proto(checkpoint) for checkpoint in page.checkpoints]
            if not page.next_page_token:
                return checkpoints
            request.page_token = page.next_page_token

    list_checkpoints = blocking(list_checkpoints_async)

    async def delete_checkpoint_async(self, path: str | Checkpoint) -> None:
        """Delete a checkpoint.

        Errors: InvalidPath, CheckpointNotFound (also if a first attempt deleted it but its answer was lost).

        path: path of the checkpoint, paceline://<run_id>/<kind>/<name>, or the Checkpoint itself.
        """
        request = codec.make(pb.DeleteCheckpointRequest, path=path_of(path))
        await self.transport.query(self.transport.trainer.DeleteCheckpoint, request)

    delete_checkpoint = blocking(delete_checkpoint_async)

    async def upload_checkpoint_async(
        self, run_id: str, directory: str | Path, name: str, *, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> Checkpoint:
        """Save the adapter of a PEFT directory, made elsewhere, as a sampler checkpoint of a run; return that.

        The run has the adapter's rank and scaling; `load_state` of it then loads the weights. Errors: RunNotFound,
        InvalidName, CheckpointExists, CheckpointMismatch (also a directory that is no adapter), ChecksumMismatch,
        InvalidArgument, NonFinite, DiskFull, QuotaExceeded.

        run_id: id of the run, as in `Run.run_id`.
        name: name of the checkpoint, the last part of its path.
        ttl_seconds: seconds after which it is deleted; None means never.
        overwrite: replace a checkpoint of this name.
        """
        _check_directory(directory)
        header = codec.make(pb.UploadHeader, run_id=run_id, name=name, ttl_seconds=ttl_seconds, overwrite=overwrite)
        return await self.transport.submit(upload(self.transport, header, Path(directory)))

    upload_checkpoint = blocking(upload_checkpoint_async)

    async def download_checkpoint_async(
        self, path: str | Checkpoint, directory: str | Path, progress: Callable[[int], object] | None = None
    ) -> Path:
        """Download a checkpoint's files into a new local directory and return its path.

        `progress` is called, on the client's own thread, with the number of bytes of each part that has arrived.
        PEFT and vLLM can load a sampler checkpoint of a LoRA run. Errors: InvalidPath, CheckpointNotFound,
        ChecksumMismatch (a file, which it names, is damaged), FileExistsError (the directory is not empty).
        """
        _check_directory(directory)
        target = Path(directory)
        await self.transport.submit(_download(self.transport, path_of(path), target, progress or _unseen))
        return target

    download_checkpoint = blocking(download_checkpoint_async)

    async def set_checkpoint_ttl_async(self, path: str | Checkpoint, ttl_seconds: int | None) -> Checkpoint:
        """Set a checkpoint to expire `ttl_seconds` from now; None means never.

        Errors: InvalidPath, CheckpointNotFound, OutOfRange.

        path: path of the checkpoint, paceline://<run_id>/<kind>/<name>, or the Checkpoint itself.
        """
        request = codec.make(pb.SetCheckpointTtlRequest, path=path_of(path), ttl_seconds=ttl_seconds)
        reply = await self.transport.query(self.transport.trainer.SetCheckpointTtl, request)
        return codec.checkpoint_from_proto(reply.checkpoint)

    set_checkpoint_ttl = blocking(set_checkpoint_ttl_async)


def _check_directory(directory: object) -> None:
    if not isinstance(directory, str | PathLike):
        raise errors.InvalidArgument.of_type(directory, "the path of a directory", "directory")


def _unseen(_: int) -> None:
    pass


def _as_object(conversation: Any) -> Mapping[str, Any]:
    if isinstance(conversation, Mapping):
        return dict(conversation)
    if isinstance(conversation, Sequence) and not isinstance(conversation, str):
        return {"messages": list(conversation)}
    raise TypeError("a conversation is a list of messages, or a dict of them")


async def _download(transport: Transport, path: str, directory: Path, progress: Callable[[int], object]) -> None:
    """Write a checkpoint's files into a new directory, which appears once all files are complete and verified.

    Raises InvalidPath, CheckpointNotFound, ChecksumMismatch, FileExistsError.
    """
    checkpoint = CheckpointPath.parse(path)
    staging = await asyncio.to_thread(_make_staging, directory)
    try:
        digests = await _receive(transport, pb.DownloadCheckpointRequest(path=str(checkpoint)), staging, progress)
        await asyncio.to_thread(_verify, staging, digests)
        await asyncio.to_thread(staging.replace, directory)
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)


def _make_staging(directory: Path) -> Path:
    """Create the staging directory that is later renamed to `directory`. Raises FileExistsError."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} already exists; name a new directory, or an empty one")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}.{uuid4().hex}")
    try:
        staging.mkdir()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from None  # the caller does not know staging's name
    return staging


async def _receive(
    transport: Transport,
    request: pb.DownloadCheckpointRequest,
    directory: Path,
    progress: Callable[[int], object],
) -> dict[str, str]:
    """Write the files of a stream; return the SHA-256 of each by name."""
    call, part = await transport.open_stream(transport.trainer.DownloadCheckpoint, request, "training")
    digests = {}
    try:
        while part is not None:
            name, left, digest = Path(part.file.name).name, part.file.size_bytes, hashlib.sha256()
            with await asyncio.to_thread((directory / name).open, "wb") as file:
                while left and (part := await read(call)) is not None and part.data:
                    await asyncio.to_thread(file.write, part.data)
                    digest.update(part.data)
                    left -= len(part.data)
                    progress(len(part.data))
            if left:
                raise errors.ChecksumMismatch(f"{name} ended {left} bytes early; download it again", field="path")
            digests[name] = digest.hexdigest()
            part = await read(call)
    except grpc.aio.AioRpcError as failure:
        raise transport.error(failure, request, "training") from failure
    finally:
        transport.end_stream(call)
    return digests


def _verify(directory: Path, digests: Mapping[str, str]) -> None:
    """Check every received file that a checksum or the manifest covers. Raises ChecksumMismatch, naming the file."""
    if MANIFEST_FILE not in digests:
        raise errors.ChecksumMismatch("the checkpoint has no manifest; it is damaged", field="path")
    sums = Sums.SHA256.value
    if sums in digests:
        listed = read_sums(directory)
        for name in {**listed, **digests}:
            if name != sums and listed.get(name) != digests.get(name):
                raise _damaged(name, sums)
    manifest = read_manifest(directory)
    weights = weights_file(manifest)
    if digests.get(weights) != manifest.sha256:
        raise _damaged(weights, "the manifest")
    if not is_model(manifest):
        config = hashlib.sha256(manifest.adapter_config).hexdigest()
        if digests.get(CONFIG_FILE) != config:
            raise _damaged(CONFIG_FILE, "the manifest")


def _damaged(name: str, known: str) -> errors.ChecksumMismatch:
    return errors.ChecksumMismatch(f"{name} differs from {known}; the checkpoint is damaged", field="path")

"""trainer.v1.TrainerService: each method decodes, calls the domain and encodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from datetime import date
from functools import partial
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import Message

from paceline import __version__, codec, errors, tracing
from paceline.codec.resources import checkpoint_to_proto, run_to_proto
from paceline.files.usage_files import Trained
from paceline.layout import CheckpointPath, check_run_id
from paceline.log import get_logger
from paceline.requests.bodies import decoded
from paceline.requests.pages import page_of
from paceline.rpc.identity import current_identity
from paceline.rpc.process_info import process_info
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from paceline.types import Checkpoint, CheckpointKind, ModelInfo, RunParameters, RunState
from paceline.weights.v1.weight_service_pb2 import Agreement
from trainer_service import validation
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.commands import CommandExecutor
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.loss_specs import LOSS_SPECS
from trainer_service.engine_link.optimizer_specs import OPTIMIZER_SPECS
from trainer_service.publish.agreements import Agreements
from trainer_service.publish.watch_hub import Watcher, WatchHub
from trainer_service.quotas import Quotas
from trainer_service.rpc.command_messages import command_of, size_of, status_to_proto
from trainer_service.run_lifecycle import OutstandingPolicy, RunLifecycle
from trainer_service.runs.command import Command, request_digest
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.settings import TrainerSettings
from trainer_service.text import ConversationRenderer
from trainer_service.uploads import AdapterUploads
from trainer_service.usage import UsageLedger

Context = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_WAIT_SECONDS = 60.0

_log = get_logger(__name__)


class _RunCommand(Protocol):
    """The request of a command: it has a place in a run's order."""

    run_id: str
    seq_id: int

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...

    def ByteSize(self) -> int: ...


class TrainerServicer(TrainerServiceServicer):
    """RPCs for runs, training, checkpoints and publishing."""

    def __init__(
        self,
        settings: TrainerSettings,
        lifecycle: RunLifecycle,
        commands: CommandExecutor,
        engine: EngineProcess,
        registry: RunRegistry,
        checkpoints: CheckpointStore,
        agreements: Agreements,
        quotas: Quotas,
        tokenizer_files: Mapping[str, bytes],
        ask_for: Callable[[RunRecord], None],
        hub: WatchHub,
        uploads: AdapterUploads,
        usage: UsageLedger,
    ) -> None:
        """`ask_for` has a run restored that somebody waits for."""
        self._settings = settings
        self._lifecycle = lifecycle
        self._commands = commands
        self._engine = engine
        self._registry = registry
        self._checkpoints = checkpoints
        self._agreements = agreements
        self._quotas = quotas
        self._tokenizer_files = tokenizer_files
        self._ask_for = ask_for
        self._hub = hub
        self._uploads = uploads
        self._usage = usage
        self._conversations = ConversationRenderer(settings.model)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            service_version=__version__,
            models=[codec.model_info_to_proto(self._engine.describe())],
            loss_fns=LOSS_SPECS,
            optimizers=OPTIMIZER_SPECS,
            max_message_bytes=self._settings.max_message_bytes,
            max_datums=self._settings.max_datums,
            agreements=self._visible_agreements(),
            unserved_modules=sorted(self._lifecycle.unserved_modules()),
            watchers=map(self._visible_watcher, self._hub.watchers()),
            process=await asyncio.to_thread(process_info),
        )

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        tenant = current_identity().tenant
        trained, token = list[Trained](), ""
        if request.trained_since:
            first = _day(request.trained_since)
            mine = self._usage.of(tenant, first)
            trained, token = page_of(mine, lambda one: one.key, request.page_size, request.page_token)
        free, total = await asyncio.to_thread(self._quotas.volume)
        return pb.GetUsageResponse(
            quotas=map(codec.quota_to_proto, self._quotas.of(tenant)),
            volume_free_bytes=free,
            volume_total_bytes=total,
            trained=[
                pb.TrainedTokens(day=one.day, run_id=one.run_id, tokens=one.tokens, passes=one.passes)
                for one in trained
            ],
            next_page_token=token,
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> pb.GetTokenizerResponse:
        self._model(request.base_model)
        return pb.GetTokenizerResponse(files=self._tokenizer_files)

    async def RenderConversations(
        self, request: pb.RenderConversationsRequest, context: Context
    ) -> pb.RenderConversationsResponse:
        longest = self._model(request.base_model).max_context_length
        found = await self._conversations.render(current_identity().tenant, request.conversations, longest)
        rendered = [pb.RenderedConversation(data=map(codec.datum_to_proto, data)) for data in found]
        return pb.RenderConversationsResponse(conversations=rendered)

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:
        if request.HasField("like_checkpoint"):
            parameters: RunParameters | CheckpointPath
            parameters = CheckpointPath.parse(request.like_checkpoint, "like_checkpoint")
        else:
            parameters = codec.parameters_from_proto(request)
        record = await self._lifecycle.create_run(
            current_identity(),
            request.request_id,
            request_digest(type(request).__name__, request.SerializeToString(deterministic=True)),
            request.base_model,
            parameters,
            request.user_metadata,
            unembed_if_served=request.unembed_if_served,
        )
        return pb.CreateRunResponse(
            run=await self._public(record), warnings=self._lifecycle.warnings(record, parameters)
        )

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=await self._public(self._run(request.run_id)))

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Context) -> pb.UpdateRunResponse:
        run = self._run(request.run_id)
        await self._lifecycle.update(run, dict(request.set), request.remove)
        return pb.UpdateRunResponse(run=await self._public(run))

    async def AttachRun(self, request: pb.AttachRunRequest, context: Context) -> pb.AttachRunResponse:
        run = self._run(request.run_id)
        attachment = await self._lifecycle.attach(run, request.request_id)
        self._ask_for(run)
        outstanding = await self._lifecycle.end_outstanding(
            run, attachment, OutstandingPolicy(request.outstanding), request.wait_seconds or _DEFAULT_WAIT_SECONDS
        )
        newest = await self._checkpoints.newest_states.find_if_readable(run.run_id)
        return pb.AttachRunResponse(
            run=run_to_proto(run.public(newest.path, self._quotas.run_bytes(run.run_id))),
            attachment=attachment,
            outstanding=[status_to_proto(status.without_reply()) for status in outstanding],
        )

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        mine = self._registry.owned_by(current_identity())
        page, token = page_of(mine, lambda run: run.list_key, request.page_size, request.page_token)
        return pb.ListRunsResponse(runs=[await self._public(run) for run in page], next_page_token=token)

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.DeleteRunResponse:
        await self._lifecycle.delete_run(self._run(request.run_id), delete_checkpoints=request.delete_checkpoints)
        return pb.DeleteRunResponse()

    async def Execute(self, request: pb.ExecuteRequest, context: Context) -> AsyncIterator[pb.ExecuteResponse]:
        seconds = request.max_seconds if request.HasField("max_seconds") else None
        run, command = await self._command(command_of(request))
        submitted = await run.sequencer.submit(command, partial(self._commands.check, run))
        async with aclosing(submitted) as stream, aclosing(stream.statuses(seconds)) as statuses:
            async for status in statuses:
                yield pb.ExecuteResponse(status=status_to_proto(status))

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.FollowResponse]:
        run = self._run(request.run_id)
        self._ask_for(run)
        seconds = request.max_seconds if request.HasField("max_seconds") else None
        followed = run.sequencer.follow(request.seq_ids or run.sequencer.outstanding)
        async with aclosing(followed) as stream, aclosing(stream.statuses(seconds)) as statuses:
            async for status in statuses:
                yield pb.FollowResponse(status=status_to_proto(status))

    async def ForwardBackward(self, request: pb.ForwardBackwardRequest, context: Context) -> pb.ForwardBackwardResponse:
        return cast("pb.ForwardBackwardResponse", await self._in_order(request))

    async def OptimStep(self, request: pb.OptimStepRequest, context: Context) -> pb.OptimStepResponse:
        return cast("pb.OptimStepResponse", await self._in_order(request))

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        return cast("pb.SaveCheckpointResponse", await self._in_order(request))

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Context) -> pb.LoadCheckpointResponse:
        return cast("pb.LoadCheckpointResponse", await self._in_order(request))

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsResponse:
        run_id = check_run_id(request.run_id) if request.run_id else ""
        kind = CheckpointKind(request.kind) if request.kind else None
        with _reading_checkpoints():
            found = await asyncio.to_thread(self._checkpoints.find_all, current_identity(), run_id, kind)
        page, token = page_of(found, _checkpoint_key, request.page_size, request.page_token)
        return pb.ListCheckpointsResponse(
            checkpoints=[checkpoint_to_proto(checkpoint) for checkpoint in page], next_page_token=token
        )

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Context
    ) -> pb.DeleteCheckpointResponse:
        await self._checkpoints.delete(CheckpointPath.parse(request.path), current_identity())
        return pb.DeleteCheckpointResponse()

    async def SetCheckpointTtl(
        self, request: pb.SetCheckpointTtlRequest, context: Context
    ) -> pb.SetCheckpointTtlResponse:
        ttl_seconds = request.ttl_seconds if request.HasField("ttl_seconds") else None
        path = CheckpointPath.parse(request.path)
        checkpoint = await self._checkpoints.set_ttl(path, current_identity(), ttl_seconds)
        return pb.SetCheckpointTtlResponse(checkpoint=checkpoint_to_proto(checkpoint))

    async def DownloadCheckpoint(
        self, request: pb.DownloadCheckpointRequest, context: Context
    ) -> AsyncIterator[pb.DownloadCheckpointResponse]:
        path = CheckpointPath.parse(request.path)
        parts = self._checkpoints.download(path, current_identity(), request.file, with_data=not request.without_data)
        async for part in parts:
            if isinstance(part, bytes):
                yield pb.DownloadCheckpointResponse(data=part)
            else:
                yield pb.DownloadCheckpointResponse(file=pb.CheckpointFile(name=part.name, size_bytes=part.size_bytes))

    async def UploadCheckpoint(
        self, request_iterator: AsyncIterator[pb.UploadCheckpointRequest], context: Context
    ) -> pb.UploadCheckpointResponse:
        identity = current_identity()
        saved = await self._uploads.save(request_iterator, lambda run_id: self._registry.get(run_id, identity))
        return pb.UploadCheckpointResponse(checkpoint=checkpoint_to_proto(saved))

    async def PublishWeights(self, request: pb.PublishWeightsRequest, context: Context) -> pb.PublishWeightsResponse:
        return cast("pb.PublishWeightsResponse", await self._in_order(request))

    def _visible_agreements(self) -> list[Agreement]:
        """Return the agreements of samplers on the base model and on versions of the caller's own runs."""
        mine = {"", *(run.run_id for run in self._registry.owned_by(current_identity()))}
        return [agreement for agreement in self._agreements.all() if agreement.model.run_id in mine]

    def _visible_watcher(self, watcher: Watcher) -> pb.WatchingSampler:
        """Describe a sampler, with the versions of the caller's own runs that it holds."""
        newest = {run.run_id: run.latest_version for run in self._registry.owned_by(current_identity())}
        versions = [
            pb.HeldVersion(
                run_id=run_id,
                version=version,
                newest=version == newest[run_id],
                acknowledged=self._hub.is_acknowledged(watcher, (run_id, version)),
            )
            for run_id, version in sorted(watcher.held)
            if run_id in newest
        ]
        return pb.WatchingSampler(sampler_id=watcher.sampler_id, versions=versions)

    def _model(self, name: str) -> ModelInfo:
        """Return the base model; an empty name means the one that is served."""
        model = self._engine.describe()
        validation.check_base_model(name, model)
        return model

    def _run(self, run_id: str) -> RunRecord:
        return self._registry.get(run_id, current_identity())

    async def _public(self, run: RunRecord) -> pb.Run:
        return run_to_proto(run.public(await self._newest_state(run), self._quotas.run_bytes(run.run_id)))

    async def _newest_state(self, run: RunRecord) -> str:
        with _reading_checkpoints():
            return (await self._checkpoints.newest_states.find(run.run_id)).path

    async def _in_order(self, request: _RunCommand) -> Message:
        """Execute a run's command at its turn."""
        run, command = await self._command(request)
        return await run.sequencer.execute(command, partial(self._commands.check, run))

    async def _command(self, request: _RunCommand) -> tuple[RunRecord, Command]:
        """Return the command of a request, and its run, which is restored first if it is not in the engine.

        A lost run accepts only a valid command that restores it, at any seq_id not yet executed: until then it has no
        order in which a refused one could keep its place.
        """
        identity = current_identity()
        run = self._registry.get(request.run_id, identity)
        self._ask_for(run)
        command = await decoded(size_of(request), Command.of, request, identity.tenant, tracing.current())
        if run.state is RunState.LOST:
            run.sequencer.check_client(command)
            if command.method != "LoadCheckpoint":
                raise run.lost_error(await self._newest_state(run))
            command = await self._commands.check(run, command)
            if command.refusal is not None:
                raise command.refusal
            if run.state is RunState.LOST:  # no other caller has restored it meanwhile
                await run.sequencer.rebase(command.seq_id)
        run.use()
        return run, command


@contextmanager
def _reading_checkpoints() -> Iterator[None]:
    """Raise EngineUnavailable, which clients try again, where checkpoints cannot be read at the moment."""
    try:
        yield
    except OSError as error:
        _log.error("checkpoints cannot be read", error=str(error))
        message = f"the run's checkpoints cannot be read at the moment ({error.strerror}); send it again"
        raise errors.EngineUnavailable(message) from error


def _checkpoint_key(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.create_time.timestamp():020.6f} {checkpoint.path}"


def _day(text: str) -> str:
    """Return a day as YYYY-MM-DD. Raises InvalidArgument."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise errors.InvalidArgument("is no day such as 2026-01-31", field="trained_since") from error

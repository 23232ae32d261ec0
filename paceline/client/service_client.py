"""The entry point: one connection, and the clients that share it."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Literal, Self
from uuid import uuid4

from paceline import codec, errors
from paceline.client.catalog import Catalog
from paceline.client.choices import chosen, text_of
from paceline.client.connection import (
    Connection,
    RetryPolicy,
    Timeouts,
    checked_seconds,
    make_connection,
    make_tls,
)
from paceline.client.results import path_of
from paceline.client.sampling_client import SamplingClient
from paceline.client.training_client import TrainingClient
from paceline.client.transport import Transport, blocking
from paceline.errors import NotServableWarning
from paceline.layout import CheckpointPath, check_run_id
from paceline.spans import span
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, FullParameters, LoraConfig, ModelRef, RunParameters, WeightStorage
from paceline.types.hints import hinted
from paceline.types.training import as_names

Outstanding = Literal["wait", "cancel", "report"]
"""What an attaching client does about commands that an earlier one left."""

_OUTSTANDING: Mapping[str, pb.OutstandingPolicy.ValueType] = {
    "wait": pb.OUTSTANDING_POLICY_WAIT,
    "cancel": pb.OUTSTANDING_POLICY_CANCEL,
    "report": pb.OUTSTANDING_POLICY_REPORT,
}
_ENDED = {pb.COMMAND_STATE_NOT_ARRIVED, pb.COMMAND_STATE_SUCCEEDED, pb.COMMAND_STATE_REFUSED}
_FIRST_ATTACH_SECONDS, _ATTACH_SECONDS = 0.5, 10.0
"""How long the first AttachRun and the next ones wait for what earlier clients left; between them the log says so."""
_log = logging.getLogger("paceline")

MAX_IN_FLIGHT = 500
"""Limits bursts: a server drops calls above its own limits, and more calls in flight gain nothing."""


class ServiceClient(Catalog):
    """A connection to a Paceline gateway.

    Methods block and return their answer; each has a twin `x_async` to await from any event loop. Use the client as a
    context manager, sync or async, or call `close`. One background thread runs the connections of all clients of a
    process; a client is safe to use from any thread. In a process forked from one that has used a client, every call
    raises Forked: use spawn instead. A pickle holds the connection settings but no key, which the other process reads
    from $PACELINE_API_KEY.

    When the client is closed or the process ends, unanswered commands of its runs are awaited for at most
    `Timeouts.close` seconds. The logger "paceline" reports this, and which calls are retried, why and for how long.

    address: host:port; by default $PACELINE_ADDRESS, else localhost:50050.
    api_key: by default $PACELINE_API_KEY; unset if the gateway requires none, never empty. Surrounding whitespace is
        stripped.
    tls_ca: PEM file of the authorities that issued the gateway's certificate, or "system" for the machine's own; by
        default $PACELINE_TLS_CA. Unset means plaintext: the key is then readable on the network. Never empty.
    tls_cert, tls_key: PEM files of a client certificate, if the gateway requires one.
    timeouts: seconds that calls may take, by kind; None is Timeouts().
    retry: for how long calls are repeated that a service could not take; None is RetryPolicy().
    max_in_flight: how many calls may be in flight at the same time, 1 or more; further calls wait.
    """

    @hinted(
        base_url="address=..., host:port",
        url="address=..., host:port",
        host="address=..., host:port",
        key="api_key=...",
        timeout="timeouts=Timeouts(...)",
    )
    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        tls = make_tls(tls_ca, tls_cert, tls_key)
        super().__init__(Transport(make_connection(address, api_key, tls, timeouts, retry, max_in_flight)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.transport.connection.address}>"

    def __reduce__(self) -> tuple[Callable[..., ServiceClient], tuple[type[ServiceClient], Connection]]:
        """Pickle the connection settings; the copy opens its own connection."""
        return _restore, (type(self), self.transport.connection)

    @hinted(
        model="base_model=...",
        model_name="base_model=...",
        lora_rank="rank=...",
        r="rank=...",
        lora_alpha="alpha=...",
        lora_dropout="dropout=...",
        metadata="user_metadata=...",
    )
    async def create_lora_training_client_async(
        self,
        base_model: str = "",
        rank: int = 32,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        seed: int = 0,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = False,
        layers: Sequence[int] = (),
        use_rslora: bool = False,
        target_modules: Sequence[str] = (),
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """Create a run that trains a LoRA adapter (see LoraConfig) and return its client.

        An empty `base_model` means the served one; `user_metadata` is stored with the run. The client's `get_info`
        lists the adapted modules. Warns with NotServableWarning if samplers watch and none of them can serve such a
        run, which could be saved, but not published. Errors: ModelNotFound, RankTooLarge, OutOfRange, InvalidArgument
        (a group that the model can only partly adapt), TooManyRuns.

        base_model: name of the base model; empty is the served one.
        rank, alpha, dropout, seed, train_attn, train_mlp, train_unembed, layers, use_rslora, target_modules: those of
            LoraConfig.
        user_metadata: texts by name that are stored with the run.
        """
        lora = LoraConfig(
            rank,
            alpha,
            dropout,
            seed,
            train_attn,
            train_mlp,
            train_unembed,
            layers=layers,
            use_rslora=use_rslora,
            target_modules=as_names(target_modules, "target_modules"),
        )
        return await self._create(base_model, lora, user_metadata)

    create_lora_training_client = blocking(create_lora_training_client_async)

    async def create_full_training_client_async(
        self,
        base_model: str = "",
        *,
        storage: WeightStorage = WeightStorage.FLOAT32,
        seed: int = 0,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """Create a run that trains every parameter of the model (see FullParameters) and return its client.

        Its versions are whole models: `publish_weights` sends them to samplers that serve whole models
        (docs/memory.md). A sampler can also be started with a checkpoint from `save_weights_for_sampler` as its model.
        Errors: ModelNotFound, OutOfMemory, TooManyRuns.

        base_model: name of the base model; empty is the served one.
        storage, seed: those of FullParameters.
        user_metadata: texts by name that are stored with the run.
        """
        if not isinstance(storage, WeightStorage):
            raise errors.InvalidArgument.of_type(storage, "WeightStorage.FLOAT32 or WeightStorage.BFLOAT16", "storage")
        return await self._create(base_model, FullParameters(storage, seed), user_metadata)

    create_full_training_client = blocking(create_full_training_client_async)

    async def create_training_client_from_state_async(self, path: str | Checkpoint) -> TrainingClient:
        """Create a run with a checkpoint's configuration and weights, and a fresh optimizer.

        The checkpoint's run may have been deleted. Errors: InvalidPath, CheckpointNotFound, ModelNotFound.

        path: path of the checkpoint, paceline://<run_id>/<kind>/<name>, or the Checkpoint itself.
        """
        return await self._from_state(path_of(path), with_optimizer=False)

    create_training_client_from_state = blocking(create_training_client_from_state_async)

    async def create_training_client_from_state_with_optimizer_async(self, path: str | Checkpoint) -> TrainingClient:
        """Like `create_training_client_from_state`, but also restore optimizer, step, RNG and pending gradient.

        path: path of the checkpoint, paceline://<run_id>/<kind>/<name>, or the Checkpoint itself.
        """
        return await self._from_state(path_of(path), with_optimizer=True)

    create_training_client_from_state_with_optimizer = blocking(create_training_client_from_state_with_optimizer_async)

    async def get_training_client_async(self, run_id: str, *, outstanding: Outstanding = "wait") -> TrainingClient:
        """Attach to a run; its next command follows the last one that was accepted.

        Only the newest client trains a run: later commands of earlier clients are refused with ClientSuperseded. To
        inspect a run without training it, use `get_run`.

        outstanding: what to do about commands of earlier clients that were accepted and have not ended. "wait" until
            they have, so that `get_info` tells the run as the next command finds it; "cancel" those that have not
            started and wait for the others; "report" does neither. The log names them. A gradient may wait afterwards
            (`get_info().gradient_tokens`), to be stepped on or dropped (`discard_gradient`).

        Errors: RunNotFound, InvalidArgument, ClientSuperseded if another client attaches meanwhile, and TimedOut if
        they have not ended within `Timeouts.training`; the run is attached to all the same.

        run_id: id of the run, as in `Run.run_id`.
        """
        chosen(outstanding, _OUTSTANDING, "outstanding")
        reply = await self.transport.submit(self._attach(run_id, outstanding))
        return TrainingClient(self.transport, codec.run_from_proto(reply.run), reply.attachment)

    async def _attach(self, run_id: str, outstanding: Outstanding) -> pb.AttachRunResponse:
        """Attach to a run, and wait as long as there is something to wait for."""
        request = codec.make(
            pb.AttachRunRequest,
            run_id=run_id,
            request_id=uuid4().hex,
            outstanding=_OUTSTANDING[outstanding],
            wait_seconds=_FIRST_ATTACH_SECONDS,
        )
        until, level = monotonic() + self.transport.timeouts.training, logging.INFO
        while True:
            reply = await self.transport.call(self.transport.trainer.AttachRun, request, "training")
            left = [status.seq_id for status in reply.outstanding if status.state not in _ENDED]
            if not left or outstanding == "report":
                return reply
            if monotonic() > until:
                message = f'commands {left} of an earlier client have not ended; attach again, or with "report"'
                raise errors.TimedOut(message, field="outstanding")
            message = "attached to %s: waiting up to %.0f s for %d command(s) of an earlier client: %s"
            _log.log(level, message, run_id, until - monotonic(), len(left), span(min(left), max(left), ""))
            request.wait_seconds, level = _ATTACH_SECONDS, logging.WARNING

    get_training_client = blocking(get_training_client_async)

    @hinted(
        model="base_model=... for the base model, or run_id=...",
        path="model_path=...",
        checkpoint="model_path=...",
        model_name="base_model=...",
    )
    def create_sampling_client(
        self, model_path: str | Checkpoint = "", *, run_id: str = "", version: int | None = None, base_model: str = ""
    ) -> SamplingClient:
        """Return a client that samples from a checkpoint, a run's version or, with neither, the base model.

        `version` None means the newest at each call. Makes no call itself. Errors: InvalidArgument if more than one is
        named, InvalidPath, RunNotFound for what no run id looks like.

        model_path: path of a sampler checkpoint, or the Checkpoint itself.
        run_id: id of the run, as in `Run.run_id`.
        base_model: name of the base model; empty is the served one.
        """
        model_path = text_of(path_of(model_path), "model_path")
        run_id, base_model = text_of(run_id, "run_id"), text_of(base_model, "base_model")
        if sum(map(bool, (model_path, run_id, base_model))) > 1 or (version is not None and not run_id):
            raise errors.InvalidArgument(
                "name one of model_path, run_id (with or without version) and base_model", field="model"
            )
        client = SamplingClient(self.transport, ModelRef(base_model, run_id, version, model_path))
        # Calls name the weights in a header too, in which gRPC takes only printable ASCII.
        if model_path:
            CheckpointPath.parse(model_path, "model_path")
        if run_id:
            check_run_id(run_id)
        return client

    async def close_async(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as in `close`
        """Like `close`, without blocking the event loop; `timeout` in seconds."""
        await self.transport.close_async(None if timeout is None else checked_seconds(timeout, "timeout"))

    def close(self, timeout: float | None = None) -> None:
        """Wait for the answers to training commands, cancel everything else, and close the connection.

        Waits at most `timeout` seconds (None: `Timeouts.close`). The log names what is being waited for and what is
        left unanswered. Clients created from this one are closed with it. Ctrl-C ends the wait.
        """
        self.transport.close(None if timeout is None else checked_seconds(timeout, "timeout"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_close_timeout_after(kind))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close_async(_close_timeout_after(kind))

    async def _create(
        self, base_model: str, parameters: RunParameters, user_metadata: Mapping[str, str] | None
    ) -> TrainingClient:
        metadata = {} if user_metadata is None else user_metadata
        request = codec.make(pb.CreateRunRequest, base_model=base_model, user_metadata=metadata)
        codec.put_parameters(request, parameters)
        return await self._create_run(request)

    async def _create_run(self, request: pb.CreateRunRequest) -> TrainingClient:
        request.request_id = uuid4().hex
        call = self.transport.call(self.transport.trainer.CreateRun, request, "training")
        made = await self.transport.submit(call)
        for warning in made.warnings:
            warnings.warn(f"run {made.run.run_id}: {warning}", NotServableWarning, stacklevel=2)
        return await self.get_training_client_async(made.run.run_id)

    async def _from_state(self, path: str, *, with_optimizer: bool) -> TrainingClient:
        try:
            client = await self._create_run(pb.CreateRunRequest(like_checkpoint=str(CheckpointPath.parse(path))))
        except errors.PacelineError as error:
            if error.field == "like_checkpoint":
                error.field = "path"  # the argument's name
            raise
        try:
            await (client.load_state_with_optimizer(path) if with_optimizer else client.load_state(path))
        except errors.PacelineError:
            await self.delete_run_async(client.run_id)
            raise
        return client


def _restore(cls: type[ServiceClient], connection: Connection) -> ServiceClient:
    client = cls.__new__(cls)
    Catalog.__init__(client, Transport(connection))
    return client


def _close_timeout_after(kind: type[BaseException] | None) -> float | None:
    """Return how long to wait for commands after a block was left by this exception: not at all after Ctrl-C."""
    gives_up = kind is not None and issubclass(kind, (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit))
    return 0.0 if gives_up else None

"""The service's interface to the engine: a separate process, so that its death does not end the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Self, TypeVar

from paceline.errors import EngineUnavailable
from paceline.types import (
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardSpec,
    ModelInfo,
    OptimizerParams,
    OptimStepOutput,
    RunParameters,
)
from trainer_service.engine import messages
from trainer_service.engine.client.connection import Captured, EngineConnection, ignore
from trainer_service.engine.client.crash_suspects import CrashSuspects
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.protocol import AdapterInfo, LoadedState, PublishedAs
from trainer_service.engine.watchdog import DEFAULT_PATIENCE, Patience
from trainer_service.failpoints import Failpoints

R = TypeVar("R")


class EngineProcess:
    """Starts an engine in a child process and mirrors TrainerEngine with coroutines.

    A run's commands are executed in the order of their calls, concurrently with those of other runs. Cancelling a call
    does not stop its execution. When the process dies, its runs are lost: the call that it was certainly executing
    raises EngineDiedError; waiting calls, and later ones until `restart`, raise EngineUnavailable. If the process was
    doing several things at once, such as a pass for several calls or a pass and a save, those calls also raise
    EngineUnavailable, and are executed alone when they are repeated. While the process lives, calls raise the engine's
    own errors. A process that hangs for longer than `patience` allows is killed, which counts as a death.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        on_exit: Callable[[int], None] | None = None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """`on_exit` is called with the exit status if the process dies by itself (negative: the signal)."""
        self._options = options
        self._on_exit = on_exit
        self._patience = patience
        self._connection: EngineConnection | None = None
        self._info: ModelInfo | None = None
        self.base_sha256 = ""
        """Identity of the base weights; set by the caller, who knows their files."""
        self._suspects = CrashSuspects()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        """Process id of the engine. Raises EngineUnavailable if it is not running."""
        return self._running().process.pid

    async def start(self) -> ModelInfo:
        """Start the process and load the model. Raises the error of loading, or EngineUnavailable."""
        connection = self._connection = await EngineConnection.open(
            self._options.ranks, self._on_exit, self._suspects, self._patience
        )
        try:
            self._info = await connection.call(messages.Start(self._options), ModelInfo)
        except BaseException:
            await self.close()
            raise
        return self._info

    async def restart(self) -> ModelInfo:
        """Stop the process, if it is still running, and start a new one, which holds no runs."""
        await self.close()
        self._options = replace(self._options, failpoints=Failpoints(self._options.failpoints).lasting)
        return await self.start()

    async def close(self) -> None:
        """Stop the process immediately; waiting calls raise EngineUnavailable."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def describe(self) -> ModelInfo:
        """Describe the loaded base model."""
        if self._info is None:
            raise EngineUnavailable("the engine has not started.")
        return replace(self._info, weights_sha256=self.base_sha256)

    async def create_run(self, run_id: str, parameters: RunParameters) -> AdapterInfo:
        return await self._call(messages.create_run(run_id, parameters), AdapterInfo)

    async def delete_run(self, run_id: str) -> None:
        await self._call(messages.DeleteRun(run_id), NoneType)

    async def forward_backward(
        self,
        run_id: str,
        data: Sequence[Datum],
        spec: ForwardBackwardSpec,
    ) -> ForwardBackwardOutput:
        return await self._call(messages.ForwardBackward(run_id, list(data), spec), ForwardBackwardOutput)

    async def optim_step(self, run_id: str, params: OptimizerParams) -> OptimStepOutput:
        return await self._call(messages.OptimStep.of(run_id, params), OptimStepOutput)

    async def save_state(self, run_id: str, directory: Path, captured: Captured = ignore) -> None:
        await self._running().call(messages.SaveState(run_id, str(directory)), NoneType, captured)

    async def save_adapter(
        self, run_id: str, directory: Path, captured: Captured = ignore, published: PublishedAs | None = None
    ) -> None:
        await self._running().call(messages.SaveAdapter(run_id, str(directory), published), NoneType, captured)

    async def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        return await self._call(messages.LoadState(run_id, str(directory), with_optimizer), LoadedState)

    def _running(self) -> EngineConnection:
        if self._connection is None:
            raise EngineUnavailable("the engine is not running.")
        return self._connection

    async def _call(self, command: messages.AnyCommand, kind: type[R]) -> R:
        return await self._running().call(command, kind)

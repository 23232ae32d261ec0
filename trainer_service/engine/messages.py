"""IPC messages between the service and the engine process: commands, replies and errors as length-prefixed msgpack.

A frame is a length (8 bytes, little-endian) followed by that many bytes of msgpack. Numpy arrays are an extension type
that holds dtype, shape and bytes. Replies carry the id of their command. A command that saves reports when it has
captured the run's state, and is answered when the state is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.errors import CATALOG, Internal, PacelineError
from paceline.types import (
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardSpec,
    FullParameters,
    LoraConfig,
    ModelInfo,
    OptimizerParams,
    OptimStepOutput,
    RunParameters,
)
from paceline.types.optimizers import optimizer_name
from paceline.types.training import Array
from trainer_service.engine.optimizers.specs import make_params, settings_of
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.protocol import AdapterInfo, LoadedState, PublishedAs, TrainerEngine

LENGTH_BYTES = 8
"""Size of a frame's length prefix."""

R = TypeVar("R")

_ARRAY_CODE = 1


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The rest of a command that has captured everything it needs from its run."""

    finish: Callable[[], None]
    """Finishes the command, in any thread. Raises PacelineError."""


class CreateRun(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.create_run."""

    run_id: str
    lora: LoraConfig

    def execute(self, engine: TrainerEngine) -> AdapterInfo:
        """Execute the command."""
        return engine.create_run(self.run_id, self.lora)


class CreateFullRun(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.create_run of a full-parameter run."""

    run_id: str
    full: FullParameters

    def execute(self, engine: TrainerEngine) -> AdapterInfo:
        """Execute the command."""
        return engine.create_run(self.run_id, self.full)


def create_run(run_id: str, parameters: RunParameters) -> CreateRun | CreateFullRun:
    """Build the command that creates a run."""
    if isinstance(parameters, LoraConfig):
        return CreateRun(run_id, parameters)
    return CreateFullRun(run_id, parameters)


class DeleteRun(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.delete_run."""

    run_id: str

    def execute(self, engine: TrainerEngine) -> None:
        """Execute the command."""
        engine.delete_run(self.run_id)


class ForwardBackward(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.begin."""

    run_id: str
    data: list[Datum]
    spec: ForwardBackwardSpec


class OptimStep(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.optim_step."""

    run_id: str
    optimizer: str
    settings: dict[str, bool | int | float]

    @classmethod
    def of(cls, run_id: str, params: OptimizerParams) -> OptimStep:
        """Build the command from an optimizer's parameters."""
        return cls(run_id, optimizer_name(params), settings_of(params))

    def execute(self, engine: TrainerEngine) -> OptimStepOutput:
        """Execute the command."""
        return engine.optim_step(self.run_id, make_params(self.optimizer, self.settings))


class SaveState(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.save_state, in the background."""

    run_id: str
    directory: str

    def execute(self, engine: TrainerEngine) -> Unfinished:
        """Capture the state; the rest may be done while later commands execute."""
        capture = engine.capture_state(self.run_id)
        return Unfinished(lambda: capture.write(Path(self.directory)))


class SaveAdapter(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.save_adapter, in the background."""

    run_id: str
    directory: str
    published: PublishedAs | None = None

    def execute(self, engine: TrainerEngine) -> Unfinished:
        """Capture the weights; the rest may be done while later commands execute."""
        capture = engine.capture_adapter(self.run_id, self.published)
        return Unfinished(lambda: capture.write(Path(self.directory)))


class LoadState(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.load_state."""

    run_id: str
    directory: str
    with_optimizer: bool

    def execute(self, engine: TrainerEngine) -> LoadedState:
        """Execute the command."""
        return engine.load_state(self.run_id, Path(self.directory), with_optimizer=self.with_optimizer)


Command = CreateRun | CreateFullRun | DeleteRun | OptimStep | SaveState | SaveAdapter | LoadState
AnyCommand = Command | ForwardBackward
READING = (SaveState, SaveAdapter)
"""Commands that change nothing in the engine; only rank 0 executes them."""
Overlapping = ForwardBackward | SaveState | SaveAdapter
"""Commands that the engine executes at the same time as others, unless `Request.alone` is set."""
Result = ModelInfo | AdapterInfo | ForwardBackwardOutput | OptimStepOutput | LoadedState | None


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first request, which builds the engine and is answered with its ModelInfo."""

    options: EngineOptions


class Request(msgspec.Struct, frozen=True):
    """A command sent to the engine."""

    id: int
    command: Start | AnyCommand
    alone: bool = False
    """Whether a ForwardBackward shares no pass with other runs, and a save is written before other commands execute."""

    @property
    def run_id(self) -> str:
        """The command's run; empty for Start."""
        return "" if isinstance(self.command, Start) else self.command.run_id


class Failure(msgspec.Struct, frozen=True):
    """A typed error."""

    reason: str
    message: str
    field: str
    metadata: dict[str, str]
    retry_after: float | None

    @classmethod
    def of(cls, error: PacelineError) -> Failure:
        """Convert an error of the catalog."""
        return cls(error.reason, error.message, error.field, error.metadata, error.retry_after)

    def error(self) -> PacelineError:
        """Return the error as an instance of the class that was raised."""
        return CATALOG.get(self.reason, Internal)(
            self.message, field=self.field, metadata=self.metadata, retry_after=self.retry_after
        )


class Began(msgspec.Struct, frozen=True, tag=True):
    """The engine starts to execute one command, or those that take part in a pass."""

    ids: list[int]
    """Ids of their requests."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a command: a failure, or a result of the type that the command returns."""

    id: int
    result: msgspec.Raw
    failure: Failure | None = None


class Captured(msgspec.Struct, frozen=True, tag=True):
    """A command that saves has captured its run's state; the next command may change it."""

    id: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat of the engine process."""

    progress: int
    """Differs from the previous heartbeat's number if the loop has made progress."""


Report = Began | Captured | Reply | Beat
"""Messages that the engine sends."""


def encode(message: Any) -> bytes:
    """Encode a message of this module, or any dataclass of such parts, without the length prefix."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(data: bytes | msgspec.Raw, kind: type[R]) -> R:
    """Decode a message of type `kind`. Raises msgspec.DecodeError. Arrays in it are read-only views of `data`."""
    return msgspec.msgpack.decode(data, type=kind, ext_hook=_decode_array, dec_hook=_check_array)


def decode_report(data: bytes) -> Report:
    """Decode a message from the engine. Raises msgspec.DecodeError."""
    report: Report = msgspec.msgpack.decode(data, type=Report)
    return report


def frame(payload: bytes) -> bytes:
    """Prefix a payload with its length."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def frames(data: bytes) -> Iterator[bytes]:
    """Yield the payloads of consecutive frames."""
    start = 0
    while start < len(data):
        begin = start + LENGTH_BYTES
        start = begin + int.from_bytes(data[start:begin], "little")
        yield data[begin:start]


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no wire form.")
    content = (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    return msgspec.msgpack.Ext(_ARRAY_CODE, msgspec.msgpack.encode(content))


def _decode_array(code: int, data: memoryview) -> Array:
    if code != _ARRAY_CODE:
        raise ValueError(f"extension {code} is not known.")
    dtype, shape, content = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], memoryview])
    return np.frombuffer(content, dtype).reshape(shape)


def _check_array(kind: Any, value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array for {kind}, got {type(value).__name__}.")
    return value

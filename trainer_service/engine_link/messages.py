"""IPC messages between the service and the engine process: commands, replies and errors as length-prefixed msgpack.

A frame is a length (8 bytes, little-endian) followed by that many bytes of msgpack. Numpy arrays are an extension type
that holds dtype, shape and bytes. Replies carry the id of their command. A command that saves reports when it has
captured the run's state, and is answered when the state is written.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.errors import CATALOG, Internal, PacelineError
from paceline.types import (
    Datum,
    ForwardBackwardSpec,
    FullParameters,
    LoraConfig,
    ModelInfo,
    RunParameters,
)
from paceline.types.training import Array
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.protocol import AccumulatedOutput, AdapterInfo, LoadedState, PublishedAs, SteppedOutput

LENGTH_BYTES = 8
"""Size of a frame's length prefix."""

R = TypeVar("R")

_ARRAY_CODE = 1

_log = logging.getLogger(__name__)


class CreateRun(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.create_run."""

    run_id: str
    lora: LoraConfig


class CreateFullRun(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.create_run of a full-parameter run."""

    run_id: str
    full: FullParameters


def create_run(run_id: str, parameters: RunParameters) -> CreateRun | CreateFullRun:
    """Build the command that creates a run."""
    if isinstance(parameters, LoraConfig):
        return CreateRun(run_id, parameters)
    return CreateFullRun(run_id, parameters)


class DeleteRun(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.delete_run."""

    run_id: str


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


class DiscardGradient(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.discard_gradient."""

    run_id: str


class SaveState(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.save_state, in the background."""

    run_id: str
    directory: str


class SaveAdapter(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.save_adapter, in the background."""

    run_id: str
    directory: str
    published: PublishedAs | None = None


class LoadState(msgspec.Struct, frozen=True, tag=True):
    """TrainerEngine.load_state."""

    run_id: str
    directory: str
    with_optimizer: bool


Command = CreateRun | CreateFullRun | DeleteRun | OptimStep | DiscardGradient | SaveState | SaveAdapter | LoadState
AnyCommand = Command | ForwardBackward
READ_ONLY = (SaveState, SaveAdapter)
"""Commands that change nothing in the engine; only rank 0 executes them."""
Overlapping = ForwardBackward | SaveState | SaveAdapter
"""Commands that the engine executes at the same time as others, unless `Request.alone` is set."""
Result = ModelInfo | AdapterInfo | AccumulatedOutput | SteppedOutput | LoadedState | int | None


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first request, which builds the engine and is answered with its ModelInfo."""

    options: EngineOptions


class Request(msgspec.Struct, frozen=True):
    """A command sent to the engine."""

    id: int
    command: Start | AnyCommand
    alone: bool = False
    """Whether a ForwardBackward shares no pass with other runs, and a save is written before other commands execute."""


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


def failure_of(error: Exception, action: str) -> Failure:
    """Convert an error. An unexpected one is logged, and the Failure carries its id."""
    if isinstance(error, PacelineError):
        return Failure.of(error)
    unforeseen = Internal.unforeseen()
    _log.error("%s failed, error_id=%s", action, unforeseen.error_id, exc_info=error)
    return Failure.of(unforeseen)


class Started(msgspec.Struct, frozen=True, tag=True):
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


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat of the engine process."""

    progress: int
    """Differs from the previous heartbeat's number if the loop has made progress."""


Report = Started | Captured | Reply | Heartbeat
"""Messages that the engine sends."""


_array_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], memoryview])


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


def frame(message: Any) -> bytes:
    """Encode a message, with the length prefix."""
    payload = encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be serialised.")
    content = (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    return msgspec.msgpack.Ext(_ARRAY_CODE, msgspec.msgpack.encode(content))


def _decode_array(code: int, data: memoryview) -> Array:
    if code != _ARRAY_CODE:
        raise ValueError(f"unknown msgpack extension {code}.")
    dtype, shape, content = _array_decoder.decode(data)
    return np.frombuffer(content, dtype).reshape(shape)


def _check_array(kind: Any, value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array for {kind}, got {type(value).__name__}.")
    return value

"""The JSON of MetaClaw's API, its data as the trainer takes them, and its names of fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Raw, Struct
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.http.json_bodies import Integers, Texts, read_struct, without_nulls
from paceline import codec, errors
from paceline.client.batching import sendable
from paceline.rpc.bounds import bounds_of
from paceline.trainer.v1.trainer_service_pb2 import ForwardBackwardRequest
from paceline.types.training import Array
from paceline.types.v1 import datum_pb2

BATCHES = "/v1/train/forward_backward"
MAX_BATCH_PARTS = 1 << 21
"""Most parts of a batch: those of 128 datums of 4,096 tokens. They are parsed one datum after the other."""
_MAX_DATUMS = bounds_of(ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"]).max_items
_LOSSES = ("importance_sampling", "ppo", "cispo")
"""The first is the default."""
_PAGE = "docs/compatibility.md"
_FIELDS = {
    r"^data\b": "datums",
    r"\.model_input\b.*": ".model_input_tokens",
    r"\.loss_inputs\[mask\].*": ".advantages",
    r"\.loss_inputs\[(\w+)\].*": r".\1",
    r"^prompt\b": "tokens",
    r"^(lora|params|adamw)\.": "",
    r"^(model\.version\.)?run_id$": "session_id",
}
"""Fields of the services -> those of this API."""


class Body(BaseModel):
    """A request. Unknown fields are refused, since they would have no effect; null means that a field is not set.

    Types are JSON's: true is no number, and neither is "2".
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return without_nulls(body)


class LoraCreate(Body):
    """Request of lora/create."""

    base_model: str = ""
    rank: int = Field(32, ge=1, le=65536)


class WireDatum(Struct, forbid_unknown_fields=True):
    """One sequence."""

    model_input_tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    advantages: list[float]


class ForwardBackward(Struct, forbid_unknown_fields=True):
    """Request of train/forward_backward."""

    session_id: str
    datums: list[Raw]
    """Each is a WireDatum."""
    loss_fn: str | None = None


class OptimStep(Body):
    """Request of train/optim_step."""

    session_id: str
    learning_rate: float = 1e-4


class WeightsSave(Body):
    """Request of weights/save."""

    session_id: str
    name: str = ""


class CheckpointSave(Body):
    """Request of checkpoint/save."""

    session_id: str
    name: str


class CheckpointLoad(Body):
    """Request of checkpoint/load."""

    session_id: str
    path: str


class Sample(Body):
    """Request of sample."""

    tokens: Integers
    num_samples: int = Field(1, ge=1, le=1_000_000)
    temperature: float = 0.7
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    """Not set: 2048, or what the prompt leaves of the context."""
    top_k: int = Field(50, ge=-1, le=2**31)
    top_p: float = 0.95
    stop: str | Texts | None = None
    session_id: str = ""
    """Not part of MetaClaw's API: the session to sample from; empty means the newest."""


@contextmanager
def named_as_here() -> Iterator[None]:
    """Name fields in errors as this API does."""
    try:
        yield
    except errors.PacelineError as error:
        for theirs, ours in _FIELDS.items():
            error.field = re.sub(theirs, ours, error.field)
        raise


@dataclass(frozen=True, slots=True)
class TrainerBatch:
    """A batch as the trainer takes it."""

    session_id: str
    loss_fn: str
    data: Sequence[datum_pb2.Datum]
    tokens: int
    """Tokens with non-zero advantage; 1 for a datum without any."""

    @classmethod
    def read(cls, content: bytes) -> TrainerBatch:
        """Parse a request, one datum after the other. Raises UnreadableMessage, InvalidArgument, OutOfRange."""
        given = read_struct(content, ForwardBackward, _PAGE)
        loss_fn = _LOSSES[0] if given.loss_fn is None else given.loss_fn
        if loss_fn not in _LOSSES:
            raise errors.UnknownLoss(f"is not known; take one of {', '.join(_LOSSES)}", field="loss_fn")
        if len(given.datums) > _MAX_DATUMS:
            message = f"has {len(given.datums)} elements; at most {_MAX_DATUMS} are accepted"
            raise errors.OutOfRange(message, field="datums")
        data, tokens = list[datum_pb2.Datum](), 0
        for index, raw in enumerate(given.datums):
            field = f"datums[{index}]"
            datum = read_struct(bytes(raw), WireDatum, _PAGE, field)
            data.append(_datum_of(datum, field))
            tokens += max(1, int(np.count_nonzero(datum.advantages)))
        return cls(given.session_id, loss_fn, data, tokens)


def _datum_of(datum: WireDatum, field: str) -> datum_pb2.Datum:
    """Convert a datum. Its loss is the mean over the tokens with non-zero advantage."""
    advantages = _floats(datum.advantages, f"{field}.advantages")
    counted = advantages != 0
    inputs: dict[str, Array] = {
        "target_tokens": _tokens(datum.target_tokens, f"{field}.target_tokens"),
        "logprobs": _floats(datum.logprobs, f"{field}.logprobs"),
        "advantages": advantages / np.float32(max(1, counted.sum())),
        "mask": counted.astype(np.uint8),
    }
    return datum_pb2.Datum(
        model_input=codec.tensor_to_proto(_tokens(datum.model_input_tokens, f"{field}.model_input_tokens")),
        loss_inputs={name: codec.tensor_to_proto(values) for name, values in inputs.items()},
    )


def _tokens(values: list[int], field: str) -> Array:
    with sendable(field):
        return np.array(values, np.int64)


def _floats(values: list[float], field: str) -> Array:
    with sendable(field), np.errstate(over="ignore"):
        return np.array(values, np.float32)

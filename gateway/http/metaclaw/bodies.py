"""The JSON of MetaClaw's API, its data as the trainer takes them, and its names of fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.http.services import without_nulls
from paceline import codec, errors
from paceline.client.batching import sendable
from paceline.types.training import Array
from paceline.types.v1 import datum_pb2

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
    """A request. Unknown fields are refused, since they would have no effect; null means that a field is not set."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return without_nulls(body)


class LoraCreate(Body):
    """Request of lora/create."""

    base_model: str = ""
    rank: int = Field(32, ge=1, le=65536)


class WireDatum(Body):
    """One sequence."""

    model_input_tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    advantages: list[float]


class ForwardBackward(Body):
    """Request of train/forward_backward."""

    session_id: str
    datums: list[WireDatum]
    loss_fn: str = "importance_sampling"


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

    tokens: list[int]
    num_samples: int = Field(1, ge=1, le=1_000_000)
    temperature: float = 0.7
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    """Not set: 2048, or what the prompt leaves of the context."""
    top_k: int = Field(50, ge=-1, le=2**31)
    top_p: float = 0.95
    stop: str | list[str] | None = None
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


def datum_of(datum: WireDatum, place: str) -> datum_pb2.Datum:
    """Convert a datum. Its loss is the mean over the tokens with non-zero advantage."""
    advantages = _floats(datum.advantages, f"{place}.advantages")
    counted = advantages != 0
    inputs: dict[str, Array] = {
        "target_tokens": _tokens(datum.target_tokens, f"{place}.target_tokens"),
        "logprobs": _floats(datum.logprobs, f"{place}.logprobs"),
        "advantages": advantages / np.float32(max(1, counted.sum())),
        "mask": counted.astype(np.uint8),
    }
    return datum_pb2.Datum(
        model_input=codec.tensor_to_proto(_tokens(datum.model_input_tokens, f"{place}.model_input_tokens")),
        loss_inputs={name: codec.tensor_to_proto(values) for name, values in inputs.items()},
    )


def _tokens(values: list[int], place: str) -> Array:
    with sendable(place):
        return np.array(values, np.int64)


def _floats(values: list[float], place: str) -> Array:
    with sendable(place), np.errstate(over="ignore"):
        return np.array(values, np.float32)

"""Hostile calls built from the contracts' descriptors, some of them nearly valid."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline.rpc.bounds import is_map
from support.fuzz.valid_requests import COMMANDS, WITHOUT_VALID, Owned, put_command, valid_request

_PROTO = Path(__file__).resolve().parents[3] / "proto"
_MAX_DEPTH = 6
ENDS = ("DeleteRun", "DeleteCheckpoint", "SetCheckpointTtl")
"""Methods that end what they name: each has a run of its own, so that the others find theirs."""
_VALID = 0.2
"""Share of the cases that start from a valid request."""
_AHEAD = (1, 1, 1, 1, 1, 1, 0, -1, 2, 3)
"""How far the seq_ids of valid commands are from the last one of the run."""
_ATTACHMENTS = (0, 0, 0, 0, 0, 0, 1, 2)
_AMOUNTS = frozenset({"max_tokens", "min_tokens", "num_samples"})
"""Fields that take only values that are small or refused, since the work grows with them."""
_TEXTS = [
    "",
    "x",
    "\0",
    "ä" * 40,
    "../../etc/passwd",
    "%s%n",
    "1e999",
    "😀",
    "a" * 200,
    "a" * 6000,
    "run-",
    "paceline://",
]
_NUMBERS = [0, 1, 2, 3, 7, 64, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 0.5]
_METADATA = [
    ("x-request-id", "../" * 20),
    ("x-request-id", "r" * 2000),
    ("x-paceline-tenant", "canary"),
    ("x-paceline-tenant", ""),
    ("x-paceline-credential", "guess"),
    ("x-paceline-route", "run-0/1" * 90),
    ("traceparent", "00-" + "f" * 300),
    ("x-any-bin", b"\xff\0" * 400),
    ("x-many", "v"),
]


def methods() -> list[MethodDescriptor]:
    """Return every method of every contract, in a fixed order."""
    found = []
    for contract in sorted(_PROTO.rglob("*_service.proto")):
        module = import_module(".".join(contract.relative_to(_PROTO).with_suffix("").parts) + "_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            found += list(service.methods)
    return found


def path_of(method: MethodDescriptor) -> str:
    """Return the path /package.Service/Method."""
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass(frozen=True)
class Case:
    """One call."""

    number: int
    method: MethodDescriptor
    messages: list[bytes]
    metadata: list[tuple[str, str | bytes]]
    leaves: bool
    """Whether the caller cancels before the answer."""

    def __str__(self) -> str:
        return f"case {self.number}: {path_of(self.method)} {[m[:200].hex() for m in self.messages]} {self.metadata}"


class CaseMaker:
    """Makes cases about what the caller owns.

    A case depends on the seed, on its number, and on where the run is: most commands continue it. `spares` has what
    each of `ENDS` names instead.
    """

    def __init__(self, seed: int, owned: Owned, spares: dict[str, Owned]) -> None:
        self._seed, self._owned, self._spares = seed, owned, spares
        self._methods = methods()
        self._commands = [method for method in self._methods if method.name in COMMANDS]
        self._texts: list[str] = []

    def make(self, number: int) -> Case:
        """Make the case with this number."""
        rng = random.Random(f"{self._seed}:{number}")
        method = self._methods[number % len(self._methods)]
        owned = self._spares.get(method.name, self._owned)
        self._texts = [*_TEXTS, *owned.names * 3]
        is_valid = method.name not in WITHOUT_VALID and rng.random() < _VALID
        if is_valid:
            messages = [self._nearly_valid(rng, method, owned)]
        else:
            count = rng.choice([0, 1, 1, 2, 4]) if method.client_streaming else rng.choice([0] + [1] * 30)
            messages = [self._message(rng, method.input_type) for _ in range(count)]
        metadata = [rng.choice(_METADATA) for _ in range(rng.randint(1, 8))] if rng.random() < 0.1 else []
        return Case(number, method, messages, metadata, rng.random() < 0.02)

    def _nearly_valid(self, rng: random.Random, method: MethodDescriptor, owned: Owned) -> bytes:
        """Return a valid request of which at most two fields are changed."""
        seq_id = max(0, owned.last_seq_id + rng.choice(_AHEAD))
        message = valid_request(method, owned, seq_id)
        if method.name == "Execute":
            put_command(message, rng.choice(self._commands), owned)
        elif method.name == "OptimStep" and rng.random() < 0.3:
            message.discard_gradient.SetInParent()
        if "attachment" in method.input_type.fields_by_name:
            message.attachment = rng.choice(_ATTACHMENTS)
        for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2))):
            self._change(rng, message, 0)
        return message.SerializeToString()

    def _change(self, rng: random.Random, message: Message, depth: int) -> None:
        """Change or clear a field, perhaps of a message within."""
        inner = [
            one
            for field, value in message.ListFields()
            if field.message_type is not None and not is_map(field)
            for one in (value if field.is_repeated else [value])
        ]
        if inner and rng.random() < 0.5:
            self._change(rng, rng.choice(inner), depth + 1)
        elif fields := message.DESCRIPTOR.fields:
            field = rng.choice(fields)
            if field.name not in _AMOUNTS and rng.random() < 0.3:
                message.ClearField(field.name)
            else:
                self._set(rng, message, field, depth)

    def _message(self, rng: random.Random, descriptor: Descriptor) -> bytes:
        kind = rng.random()
        if kind < 0.1:
            return rng.randbytes(rng.choice([1, 5, 50, 500]))
        data = bytearray(self._fill(rng, descriptor, 0).SerializeToString())
        if kind < 0.3 and data:
            for _ in range(rng.randint(1, 4)):
                _mutate(rng, data)
        return bytes(data)

    def _fill(self, rng: random.Random, descriptor: Descriptor, depth: int) -> Message:
        message = GetMessageClass(descriptor)()
        if descriptor.full_name == "paceline.types.v1.Tensor" and rng.random() < 0.7:
            length = rng.randint(1, 8)
            message.dtype, message.data = 3, struct.pack(f"<{length}i", *(rng.randrange(260) for _ in range(length)))
            message.shape.append(length)
            return message
        for field in descriptor.fields:
            if rng.random() < 0.6:
                self._set(rng, message, field, depth)
        return message

    def _set(self, rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
        if is_map(field):
            entries, value = getattr(message, field.name), field.message_type.fields_by_name["value"]
            for _ in range(rng.randint(0, 4)):
                key = rng.choice([*self._texts, "target_tokens", "weights", "logprobs", "advantages", "mask"])
                if value.message_type is None:
                    entries[key] = self._scalar(rng, value)
                elif depth < _MAX_DEPTH:
                    entries[key].CopyFrom(self._fill(rng, value.message_type, depth + 1))
        elif field.message_type is not None:
            if depth >= _MAX_DEPTH:
                return
            targets = (
                [getattr(message, field.name).add() for _ in range(rng.randint(0, 3))]
                if field.is_repeated
                else [getattr(message, field.name)]
            )
            for target in targets:
                target.SetInParent()
                target.CopyFrom(self._fill(rng, field.message_type, depth + 1))
        elif field.is_repeated:
            most = rng.choice([1, 3, 9, 100])
            getattr(message, field.name).extend(self._scalar(rng, field) for _ in range(rng.randint(0, most)))
        else:
            setattr(message, field.name, self._scalar(rng, field))

    def _scalar(self, rng: random.Random, field: FieldDescriptor) -> object:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice(self._texts)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice([*_FLOATS, rng.random()])
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([0, 1, 2, 3, 4, 77, -1])
        number = rng.choice([0, 1, 4, 2**32 - 1] if field.name in _AMOUNTS else [*_NUMBERS, *range(1, 12)])
        bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
        if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
            return rng.choice([1, -1]) * (number % 2 ** (bits - 1))
        return number % 2**bits


def _mutate(rng: random.Random, data: bytearray) -> None:
    if not data:
        return
    at, how = rng.randrange(len(data)), rng.randrange(4)
    if how == 0:
        data[at] = rng.randrange(256)
    elif how == 1:
        del data[at:]
    elif how == 2:
        data[at:at] = rng.randbytes(rng.randint(1, 8))
    else:
        data[at:at] = data[at : at + rng.randint(1, 40)]

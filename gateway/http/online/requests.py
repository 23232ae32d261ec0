"""Bodies of /train and /checkpoint, validated while they are parsed, so that a large invalid body costs little."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.http.json_bodies import read_struct
from paceline import errors

DEFAULT_MODEL = "online"
ModelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
Optimizer = Literal["apollo_mini", "apollo", "adamw", "adamw_8bit", "adamw_cpu", "adafactor"]
_BODY = re.compile(r"conversations\[(\d+)\](?:\.messages\[([01])\])?")
_WANTED = {
    "model": "is 1 to 64 of A-Z a-z 0-9 _ . -",
    "optimizer": f"is one of {', '.join(get_args(Optimizer))}",
}
T = TypeVar("T")


class Message(Struct):
    """A message of a conversation, with any other fields that the template uses."""

    role: str
    content: str | list[Any] | None = None
    weight: Literal[0, 1] = 1


class Conversation(Struct, forbid_unknown_fields=True):
    """Messages as in OpenAI's chat API. The loss covers the assistant's."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Pair(Struct, forbid_unknown_fields=True):
    """A conversation of two messages."""

    prompt: str
    response: str

    def conversation(self) -> bytes:
        """Return the pair as a conversation."""
        messages = [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.response}]
        return msgspec.json.encode({"messages": messages})


class Lora(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An adapter, trained in place of all parameters."""

    rank: Annotated[int, Meta(ge=1, le=65536)]
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None = None


class TrainRequest(Struct, forbid_unknown_fields=True):
    """Request of /train."""

    model: ModelName = DEFAULT_MODEL
    conversations: list[Raw] = []
    """Each is a Conversation, or its messages alone."""
    pairs: list[Pair] = []
    learning_rate: Annotated[float, Meta(ge=0, le=1e6)] = 1e-4
    batch_size: Annotated[int, Meta(ge=1, le=256)] = 8
    optimizer: Optimizer | None = None
    lora: Lora | None = None

    def bodies(self) -> list[bytes]:
        """Return all conversations, pairs last, in the trainer's format. Raises InvalidArgument, EmptyBatch."""
        found = [_conversation(bytes(raw), f"conversations[{index}]") for index, raw in enumerate(self.conversations)]
        found += [pair.conversation() for pair in self.pairs]
        if not found:
            raise errors.EmptyBatch("is empty, as is pairs; send one of them", field="conversations")
        return found

    def field_of(self, theirs: str) -> str:
        """Return the field that a place in `bodies`, as the trainer's errors name it, was made from."""
        found = _BODY.match(theirs)
        if found is None or (index := int(found[1]) - len(self.conversations)) < 0:
            return theirs
        return f"pairs[{index}]" + {"0": ".prompt", "1": ".response"}.get(found[2], "")


class CheckpointRequest(Struct, forbid_unknown_fields=True):
    """Request of /checkpoint."""

    model: ModelName = DEFAULT_MODEL
    name: Annotated[str, Meta(max_length=128)] = ""


def read(content: bytes, kind: type[T], field: str = "") -> T:
    """Parse JSON. `field` is its position in the body. Raises UnreadableMessage, UnknownField, InvalidArgument."""
    return read_struct(content, kind, "docs/online.md", field, _WANTED)


def _conversation(content: bytes, field: str) -> bytes:
    """Check a conversation and return it as a JSON object."""
    if content[:1] == b"[":
        content = b'{"messages":' + content + b"}"
    try:
        conversation = read(content, Conversation, field)
    except errors.UnknownField as error:
        if error.field == f"{field}.role":
            message = "is a message; a conversation is a list of messages: put one more pair of brackets around them"
            raise errors.InvalidArgument(message, field=field) from error
        raise
    if not any(message.role == "assistant" and message.weight for message in conversation.messages):
        raise errors.InvalidArgument("has no message of role assistant with weight 1", field=f"{field}.messages")
    return content

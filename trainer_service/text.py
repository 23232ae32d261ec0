"""The base model's tokenizer and chat template.

Clients get the tokenizer's files, so that they need no copy of the model. Conversations are converted to training data,
rendered by the model's chat template, with the loss on responses only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from paceline import errors, layout
from paceline.chat.bodies import check_length, read_chat_body
from paceline.chat.messages import (
    ASSISTANT,
    MESSAGE_FIELDS,
    TEMPLATE_KWARGS,
    Message,
    read_messages,
    read_template_kwargs,
    read_tools,
    texts_of,
)
from paceline.files.regular_files import read_file
from paceline.types import Datum
from trainer_service.chat_template import ChatTemplate, Turn

_FIELDS = frozenset({"messages", "tools", TEMPLATE_KWARGS})
_ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")
_BILLING = "x-anthropic-billing-header"
"""vLLM drops a line of a system message that starts with it."""
_MAX_WORK = 1 << 26
"""Most characters that templates may write for a conversation; each response is rendered with everything before it."""
_MESSAGE_WORK = 64
"""Characters counted for what a template writes around a message."""
_RENDERINGS_OF_KWARG = 2
"""How often a response is rendered to see what a variable of the template changes."""
_SLICE_WORK, _SLICE_TOKENS = 1 << 20, 1 << 16
"""Limits after which another tenant gets its turn."""
_REPLY_TOKENS = 1 << 19
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.tiktoken",
    "spiece.model",
    "config.json",
)
_NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates, such as one for tools. Clients get flat files, so these go into one of them."""
_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


def read_tokenizer_files(model: str) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files by name.

    `model` is a local directory or a Hugging Face id, which is looked up in the hub's cache. Clients get these files.
    Raises ModelNotLoadable if one is a link that leads out of the model.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only needed for hub ids

        directory = Path(snapshot_download(model, allow_patterns=[*_TOKENIZER_FILES, f"{_NAMED_TEMPLATES}/*"]))
    found = {path for pattern in _TOKENIZER_FILES for path in layout.entries(directory, pattern) if path.is_file()}
    files = {path.name: read_file(_inside(path, directory.resolve())) for path in sorted(found)}
    named = layout.entries(directory / _NAMED_TEMPLATES, "*.jinja")
    return _with_named(files, {path.stem: read_file(_inside(path, directory.resolve())) for path in named})


def _with_named(files: dict[str, bytes], named: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a tokenizer's files with further chat templates by their names, in the form that has all in one file."""
    if not named:
        return files
    config = json.loads(files.get(_TOKENIZER_CONFIG, b"{}"))
    default = files.get(_TEMPLATE, b"").decode() or config.get("chat_template")
    templates = {name: text.decode() for name, text in named.items()}
    if isinstance(default, str):
        templates["default"] = default
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    others = {name: content for name, content in files.items() if name != _TEMPLATE}
    return {**others, _TOKENIZER_CONFIG: json.dumps(config, ensure_ascii=False).encode()}


def _inside(path: Path, directory: Path) -> Path:
    """Return the file that a path leads to. Raises ModelNotLoadable if it is outside the model."""
    file, folders = path.resolve(), [directory]
    if directory.parent.name == "snapshots":  # of the hub's cache, where snapshots/<commit> links to blobs
        folders.append(directory.parent.parent / "blobs")
    if not any(file.is_relative_to(folder) for folder in folders):
        message = f"{path.name} is a link to a file outside the model's directory; copy the file there"
        raise errors.ModelNotLoadable(message, field="base_model")
    return file


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A validated conversation."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    trained: list[int]
    """Indices of the messages to train on."""
    work: int
    """Characters that a template writes to render it."""


@dataclass(slots=True)
class _Sequence:
    """Tokens, and which of them the model learns to generate."""

    tokens: list[int] = field(default_factory=list)
    is_response: list[bool] = field(default_factory=list)

    def precedes(self, turn: Turn) -> bool:
        return turn.prompt[: len(self.tokens)] == self.tokens

    def add(self, turn: Turn) -> None:
        self.is_response += [False] * (len(turn.prompt) - len(self.tokens)) + [True] * len(turn.response)
        self.tokens = turn.prompt + turn.response

    def datum(self) -> Datum:
        """Return the sequence as a datum, shifted by one position."""
        counted = np.array(self.is_response[1:], np.uint8)
        return Datum(
            np.array(self.tokens[:-1], np.int32),
            {
                "target_tokens": np.array(self.tokens[1:], np.int64),
                "weights": counted.astype(np.float32),
                "mask": counted,
            },
        )


class ConversationRenderer:
    """Renders conversations with one model's chat template, which is loaded on first use.

    One thread renders a slice of a call at a time, so that tenants take turns.
    """

    def __init__(self, model: str) -> None:
        """`model` is a local directory or a Hugging Face id."""
        self._model = model
        self._loaded: ChatTemplate | None = None
        self._thread = ThreadPoolExecutor(1, "conversations")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def render(self, tenant: str, bodies: Sequence[bytes], max_context_length: int) -> list[list[Datum]]:
        """Return the data of the first conversations: as many as fit in a reply, and at least one.

        Raises UnreadableMessage, EmptyBatch, InvalidArgument, UnknownField, SequenceTooLong, OutOfRange, Unsupported,
        with the index of the conversation in `field`.
        """
        if not bodies:
            raise errors.EmptyBatch("has no conversations", field="conversations")
        loop, tokens, rendered = asyncio.get_running_loop(), 0, list[list[Datum]]()
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            while len(rendered) < len(bodies) and tokens < _REPLY_TOKENS:
                work = partial(self._render_slice, bodies, len(rendered), max_context_length)
                found = await loop.run_in_executor(self._thread, work)
                tokens += sum(len(datum.model_input) for data in found for datum in data)
                rendered += found
        return rendered

    def _render_slice(self, bodies: Sequence[bytes], first: int, max_context_length: int) -> list[list[Datum]]:
        work = tokens = 0
        rendered: list[list[Datum]] = []
        for index, body in enumerate(bodies[first:], first):
            try:
                conversation = _parse(body, max_context_length)
                rendered.append(self._render(conversation, max_context_length))
            except errors.PacelineError as error:
                field = f"conversations[{index}]"
                error.field = f"{field}.{error.field}" if error.field else field
                raise
            work += conversation.work
            tokens += sum(len(datum.model_input) for datum in rendered[-1])
            if work >= _SLICE_WORK or tokens >= _SLICE_TOKENS:
                break
        return rendered

    def _render(self, conversation: _Conversation, longest: int) -> list[Datum]:
        """Return one datum if each prompt starts with everything before it, otherwise several."""
        template, sequences = self._load().with_kwargs(conversation.template_kwargs), list[_Sequence]()
        messages, tools = conversation.messages, conversation.tools
        template.check(messages[: conversation.trained[-1] + 1], tools)
        template.check_kwargs([messages[: last + 1] for last in conversation.trained], tools)
        for last in conversation.trained:
            turn = template.turn(messages[: last + 1], tools)
            length = len(turn.prompt) + len(turn.response)
            if length > longest + 1:
                raise errors.SequenceTooLong(f"has {length} tokens; the context is {longest}", field="messages")
            if not sequences or not sequences[-1].precedes(turn):
                sequences.append(_Sequence())
            sequences[-1].add(turn)
        return [sequence.datum() for sequence in sequences]

    def _load(self) -> ChatTemplate:
        if self._loaded is None:
            self._loaded = ChatTemplate.load(self._model)
        return self._loaded


def _parse(body: bytes, max_context_length: int) -> _Conversation:
    given = read_chat_body(body)
    for name in given.keys() - _FIELDS:
        hint = "belongs to a message; a conversation is a list of them" if name in MESSAGE_FIELDS else "is not known"
        raise errors.UnknownField(f"{hint}: send messages and, if the template supports them, tools", field=name[:80])
    weights, plain = _without_weights(given.get("messages"))
    messages, tools = read_messages(plain), read_tools(given.get("tools"))
    template_kwargs = read_template_kwargs(given.get(TEMPLATE_KWARGS))
    if len(messages) > max_context_length:
        message = f"has {len(messages)} messages; the context is {max_context_length} tokens"
        raise errors.SequenceTooLong(message, field="messages")
    length = check_length("messages", [messages, tools, template_kwargs], max_context_length)
    trained = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT and weights[index]]
    _check_trained(messages, trained)
    for index in range(len(messages)):
        _check_message(messages[index], index, is_trained=index in trained)
    responses = sum(message["role"] == ASSISTANT for message in messages)
    renderings = responses * (1 + _RENDERINGS_OF_KWARG * len(template_kwargs))
    work = renderings * (length + _MESSAGE_WORK * len(messages))
    if work > _MAX_WORK:
        message = f"have {responses} responses in {length} characters, too many to render each with its prompt"
        raise errors.OutOfRange(f"{message}; split them into several conversations", field="messages")
    return _Conversation(messages, tools, template_kwargs, trained, work)


def _without_weights(messages: Any) -> tuple[list[int], Any]:
    """Return the weight of each message, and the messages without it."""
    if not isinstance(messages, list):
        return [], messages
    weights, plain = list[int](), list[Any]()
    for index, message in enumerate(messages):
        weight = message.get("weight", 1) if isinstance(message, dict) else 1
        if isinstance(weight, bool) or weight not in (0, 1):
            raise errors.InvalidArgument("must be 0 or 1", field=f"messages[{index}].weight")
        weights.append(int(weight))
        is_weighted = isinstance(message, dict) and "weight" in message
        plain.append({name: message[name] for name in message if name != "weight"} if is_weighted else message)
    return weights, plain


def _check_trained(messages: Sequence[Message], trained: Sequence[int]) -> None:
    if not trained:
        raise errors.InvalidArgument(f"has no message of role {ASSISTANT} with weight 1", field="messages")
    if trained[0] == 0:
        raise errors.InvalidArgument("is from the assistant; a response needs a message before it", field="messages[0]")
    last = len(messages) - 1
    if messages[last]["role"] != ASSISTANT:
        message = "comes after the last response, so that nothing is trained on it; leave it out"
        raise errors.InvalidArgument(message, field=f"messages[{last}]")


def _check_message(message: Message, index: int, *, is_trained: bool) -> None:
    field = f"messages[{index}]"
    if message["role"] not in _ROLES:
        raise errors.InvalidArgument(f"must be one of {', '.join(_ROLES)}", field=f"{field}.role")
    texts = texts_of(message["content"])
    says_nothing = not "".join(texts).strip() and not message.get("reasoning") and "tool_calls" not in message
    if is_trained and says_nothing:
        raise errors.InvalidArgument("is empty, which would train the model to say nothing", field=f"{field}.content")
    if message["role"] == "system" and any(text.startswith(_BILLING) for text in texts):
        problem = f"starts with {_BILLING}, a line that is dropped when the model is served; leave it out"
        raise errors.InvalidArgument(problem, field=f"{field}.content")

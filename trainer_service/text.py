"""The base model's tokenizer and chat template.

Clients get the tokenizer's files, so that they need no copy of the model. Conversations are converted to training data,
rendered by the model's chat template, with the loss on responses only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from paceline import errors, layout
from paceline.chat import check_length, check_messages, read_chat_body
from paceline.regular_files import read_file
from paceline.types import Datum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELDS = frozenset({"messages", "tools"})
_ASSISTANT = "assistant"
_ROLES = ("system", "developer", "user", _ASSISTANT, "tool", "function")
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "weight", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking"}
)
_MAX_WORK = 1 << 26
"""Most characters that templates may write for a conversation; each response is rendered with everything before it."""
_MESSAGE_WORK = 64
"""Characters counted for what a template writes around a message."""
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


def read_tokenizer_files(model: str) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files by name.

    `model` is a local directory or a Hugging Face id, which is looked up in the hub's cache. Clients get these files.
    Raises ModelNotLoadable if one is a link that leads out of the model.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only needed for hub ids

        directory = Path(snapshot_download(model, allow_patterns=list(_TOKENIZER_FILES)))
    files = {path for pattern in _TOKENIZER_FILES for path in layout.entries(directory, pattern) if path.is_file()}
    return {path.name: read_file(_inside(path, directory.resolve())) for path in sorted(files)}


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

    messages: list[dict[str, Any]]
    tools: Any
    trained: list[int]
    """Indices of the messages to train on."""
    work: int
    """Characters that a template writes to render it."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A response and its prompt, in tokens."""

    prompt: list[int]
    response: list[int]
    generated: int
    """Number of tokens in the response that the model generates; the template writes the rest."""


@dataclass(slots=True)
class _Sequence:
    """Tokens, and which of them the model learns to generate."""

    tokens: list[int] = field(default_factory=list)
    is_response: list[bool] = field(default_factory=list)

    def precedes(self, turn: _Turn) -> bool:
        return turn.prompt[: len(self.tokens)] == self.tokens

    def add(self, turn: _Turn) -> None:
        added = len(turn.prompt) - len(self.tokens)
        self.is_response += [False] * added + [True] * turn.generated + [False] * (len(turn.response) - turn.generated)
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
    """Renders conversations with one model's tokenizer, which is loaded on first use.

    One thread renders a slice of a call at a time, so that tenants take turns.
    """

    def __init__(self, model: str) -> None:
        """`model` is a local directory or a Hugging Face id."""
        self._model = model
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._ends: frozenset[int] = frozenset()
        """Tokens that end sampling."""
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
                place = f"conversations[{index}]"
                error.field = f"{place}.{error.field}" if error.field else place
                raise
            work += conversation.work
            tokens += sum(len(datum.model_input) for datum in rendered[-1])
            if work >= _SLICE_WORK or tokens >= _SLICE_TOKENS:
                break
        return rendered

    def _render(self, conversation: _Conversation, longest: int) -> list[Datum]:
        """Return one datum if each prompt starts with everything before it, otherwise several."""
        if conversation.tools and not self._renders_tools(conversation):
            raise errors.Unsupported("are ignored by the model's chat template; leave them out", field="tools")
        sequences: list[_Sequence] = []
        for last in conversation.trained:
            turn = self._turn(conversation.messages[: last + 1], conversation.tools)
            length = len(turn.prompt) + len(turn.response)
            if length > longest + 1:
                raise errors.SequenceTooLong(f"has {length} tokens; the context is {longest}", field="messages")
            if not sequences or not sequences[-1].precedes(turn):
                sequences.append(_Sequence())
            sequences[-1].add(turn)
        return [sequence.datum() for sequence in sequences]

    def _renders_tools(self, conversation: _Conversation) -> bool:
        with_tools, without = (
            _render_template(self._load(), conversation.messages[:1], tools, add_generation_prompt=True)
            for tools in (conversation.tools, None)
        )
        return with_tools != without

    def _turn(self, messages: list[dict[str, Any]], tools: Any) -> _Turn:
        """Tokenize the last message as a response, and the others as its prompt."""
        tokenizer = self._load()
        prompt = _render_template(tokenizer, messages[:-1], tools, add_generation_prompt=True)
        whole = _render_template(tokenizer, messages, tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            message = "the model's chat template renders a response differently from the prompt for one"
            raise errors.InvalidArgument(message, field="messages")
        tokens, response = _encode(tokenizer, prompt), _encode(tokenizer, whole[len(prompt) :])
        if not tokens:
            raise errors.InvalidArgument("starts with the response; a response needs a prompt", field="messages")
        place = f"messages[{len(messages) - 1}]"
        if not response:
            raise errors.InvalidArgument("is empty when rendered by the model's chat template", field=place)
        ends = [index for index, token in enumerate(response) if token in self._ends]
        if len(ends) > 1:
            raise errors.InvalidArgument("contains the token that ends a response", field=place)
        return _Turn(tokens, response, ends[0] + 1 if ends else len(response))

    def _load(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            from transformers import AutoTokenizer, GenerationConfig  # noqa: PLC0415 - takes seconds, only needed here

            tokenizer = AutoTokenizer.from_pretrained(self._model, trust_remote_code=False, local_files_only=True)
            ends = {tokenizer.eos_token_id}
            with suppress(OSError):  # not every model has one
                given = GenerationConfig.from_pretrained(self._model, local_files_only=True).eos_token_id
                ends |= set(given) if isinstance(given, list) else {given}
            self._tokenizer, self._ends = tokenizer, frozenset(ends - {None})
        if not self._tokenizer.chat_template:
            raise errors.Unsupported("the model's tokenizer has no chat template", field="messages")
        return self._tokenizer


def _parse(body: bytes, max_context_length: int) -> _Conversation:
    given = read_chat_body(body)
    for name in given.keys() - _FIELDS:
        hint = "belongs to a message; a conversation is a list of them" if name in _MESSAGE_FIELDS else "is not known"
        raise errors.UnknownField(f"{hint}: send messages and, if the template supports them, tools", field=name[:80])
    messages, tools = check_messages(given.get("messages")), given.get("tools")
    if len(messages) > max_context_length:
        message = f"has {len(messages)} messages; the context is {max_context_length} tokens"
        raise errors.SequenceTooLong(message, field="messages")
    length = check_length("messages", [messages, tools], max_context_length)
    trained = [index for index, message in enumerate(messages) if _is_trained(message, index)]
    if not trained:
        raise errors.InvalidArgument(f"has no message of role {_ASSISTANT} with weight 1", field="messages")
    if trained[0] == 0:
        raise errors.InvalidArgument("is from the assistant; a response needs a message before it", field="messages[0]")
    plain = [_template_message(message, index) for index, message in enumerate(messages)]
    work = len(trained) * (length + _MESSAGE_WORK * len(messages))
    if work > _MAX_WORK:
        message = f"have {len(trained)} responses in {length} characters, too many to render each with its prompt"
        raise errors.OutOfRange(f"{message}; split them into several conversations", field="messages")
    return _Conversation(plain, tools, trained, work)


def _template_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a message as templates expect it: with its parts joined into one text, and without a weight."""
    place = f"messages[{index}]"
    for name in message.keys() - _MESSAGE_FIELDS:
        raise errors.UnknownField("is not known", field=f"{place}.{name[:80]}")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise errors.InvalidArgument(f"must be one of {', '.join(_ROLES)}", field=f"{place}.role")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    calls_tools = role == _ASSISTANT and message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls_tools):
        raise errors.InvalidArgument("must be text", field=f"{place}.content")
    if not content and role == _ASSISTANT and not calls_tools:
        raise errors.InvalidArgument("is empty, which would train the model to say nothing", field=f"{place}.content")
    return {**{name: value for name, value in message.items() if name != "weight"}, "content": content}


def _is_trained(message: dict[str, Any], index: int) -> bool:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise errors.InvalidArgument("must be 0 or 1", field=f"messages[{index}].weight")
    return message.get("role") == _ASSISTANT and weight == 1


def _render_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any, *, add_generation_prompt: bool
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template is code that comes with the model
        problem = f"the model's chat template failed: {error}"
        raise errors.InvalidArgument(problem[:500], field="messages") from error
    if not isinstance(text, str):
        raise errors.InvalidArgument("has more than one conversation", field="messages")
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found

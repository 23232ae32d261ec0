"""Conversations as data to train on: written by the model's chat template, with the loss on responses alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline import errors
from paceline.chat import check_length, check_messages, read_chat_body
from paceline.types import Datum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELDS = frozenset({"messages", "tools"})
_ASSISTANT = "assistant"
_MOST_WORK = 1 << 26
"""Characters that templates may write for one request, each response with all that is before it."""
_WORK_OF_MESSAGE = 64
"""What the frame of a message counts as, in characters."""
_MOST_TOKENS = 1 << 20
"""In an answer."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation that was checked."""

    messages: list[dict[str, Any]]
    tools: Any
    trained: list[int]
    """Numbers of the messages to learn from."""
    work: int
    """Characters that a template writes to render it."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A response and what it is the response to, in tokens."""

    prompt: list[int]
    response: list[int]
    said: int
    """Of the response, how many tokens the model says; the template writes the rest."""


@dataclass(slots=True)
class _Sequence:
    """Tokens, and which of them the model is to learn to say."""

    tokens: list[int] = field(default_factory=list)
    is_response: list[bool] = field(default_factory=list)

    def precedes(self, turn: _Turn) -> bool:
        return turn.prompt[: len(self.tokens)] == self.tokens

    def add(self, turn: _Turn) -> None:
        added = len(turn.prompt) - len(self.tokens)
        self.is_response += [False] * added + [True] * turn.said + [False] * (len(turn.response) - turn.said)
        self.tokens = turn.prompt + turn.response

    def datum(self) -> Datum:
        """Shift it by one position."""
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
    """Renders conversations with the tokenizer of one model, which is loaded when it is first needed."""

    def __init__(self, model: str) -> None:
        """Take a local directory or a Hugging Face id."""
        self._model = model
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._lock = threading.Lock()  # of the tokenizer, which is not safe to share

    def render(self, bodies: Sequence[bytes], max_context_length: int) -> list[list[Datum]]:
        """Return the data of each conversation. Blocks.

        Raises UnreadableMessage, EmptyBatch, InvalidArgument, UnknownField, SequenceTooLong, Unsupported, with the
        number of the conversation in `field`, and OutOfRange.
        """
        if not bodies:
            raise errors.EmptyBatch("holds no conversation", field="conversations")
        conversations, rendered = [], []
        for index, body in enumerate(bodies):
            with _named(index):
                conversations.append(_read(body, max_context_length))
        if (work := sum(each.work for each in conversations)) > _MOST_WORK:
            message = f"take {work} characters to write, at most {_MOST_WORK}; send fewer at a time"
            raise errors.OutOfRange(message, field="conversations")
        tokens = 0
        for index, conversation in enumerate(conversations):
            with _named(index), self._lock:
                rendered.append(self._render(conversation, max_context_length))
            tokens += sum(len(datum.model_input) for datum in rendered[-1])
            if tokens > _MOST_TOKENS:
                message = f"become more than {_MOST_TOKENS} tokens; send fewer at a time"
                raise errors.OutOfRange(message, field="conversations")
        return rendered

    def _render(self, conversation: _Conversation, longest: int) -> list[Datum]:
        """Return one datum where each prompt begins with all that was before it, else several."""
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

    def _turn(self, messages: list[dict[str, Any]], tools: Any) -> _Turn:
        """Return the last message, and the others as its prompt."""
        tokenizer = self._load()
        prompt = _write(tokenizer, messages[:-1], tools, add_generation_prompt=True)
        whole = _write(tokenizer, messages, tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            message = "the model's chat template writes a response otherwise than it prompts for one"
            raise errors.InvalidArgument(message, field="messages")
        tokens, response = _encode(tokenizer, prompt), _encode(tokenizer, whole[len(prompt) :])
        if not tokens:
            raise errors.InvalidArgument("begins with the response; there is nothing to say it to", field="messages")
        ends = [index for index, token in enumerate(response) if token == tokenizer.eos_token_id]
        return _Turn(tokens, response, ends[-1] + 1 if ends else len(response))

    def _load(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, which only those wait who render

            self._tokenizer = AutoTokenizer.from_pretrained(self._model, trust_remote_code=False, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise errors.Unsupported("the model's tokenizer has no chat template", field="messages")
        return self._tokenizer


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Name the conversation in errors about it."""
    try:
        yield
    except errors.PacelineError as error:
        place = f"conversations[{index}]"
        error.field = f"{place}.{error.field}" if error.field else place
        raise


def _read(body: bytes, max_context_length: int) -> _Conversation:
    given = read_chat_body(body)
    for name in given.keys() - _FIELDS:
        raise errors.UnknownField(f"is not known; take {' and '.join(sorted(_FIELDS))}", field=name[:80])
    messages, tools = check_messages(given.get("messages")), given.get("tools")
    length = check_length("messages", [messages, tools], max_context_length)
    trained = [index for index, message in enumerate(messages) if _is_trained(message, index)]
    if not trained:
        raise errors.InvalidArgument(f"has no message of role {_ASSISTANT} to learn from", field="messages")
    plain = [_plain(message, index) for index, message in enumerate(messages)]
    return _Conversation(plain, tools, trained, len(trained) * (length + _WORK_OF_MESSAGE * len(messages)))


def _plain(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a message as templates take it: its parts as one text, and no weight."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise errors.InvalidArgument("must be text", field=f"messages[{index}].content")
    return {**{name: value for name, value in message.items() if name != "weight"}, "content": content}


def _is_trained(message: dict[str, Any], index: int) -> bool:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise errors.InvalidArgument("is 0 or 1", field=f"messages[{index}].weight")
    return message.get("role") == _ASSISTANT and weight == 1


def _write(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any, *, add_generation_prompt: bool
) -> str:
    from jinja2 import TemplateError  # noqa: PLC0415 - comes with transformers

    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        problem = f"the model's chat template does not take them: {error}"
        raise errors.InvalidArgument(problem[:500], field="messages") from error
    if not isinstance(text, str):
        raise errors.InvalidArgument("is more than one conversation", field="messages")
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found

"""The base model's chat template: responses rendered as they are sampled, and fields that it ignores found.

A response is trained as the continuation of the prompt that the sampler builds for it, up to the token that ends
sampling. `Turn` says what that is, whatever the template writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

from paceline import errors
from paceline.chat.messages import (
    ASSISTANT,
    TEMPLATE_KWARGS,
    ContentFormat,
    Message,
    as_rendered,
    content_format,
    texts_of,
)
from trainer_service.template_marks import MarkedConversation, mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = list[dict[str, Any]] | None
_HARMONY = "<|channel|>analysis"
_START_OF_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_OPENED_THOUGHT = re.compile(r"<think>\s*\Z")
_CLOSED_THOUGHT = re.compile(r"</think>\s*\Z")
_SECOND_THOUGHT = re.compile(r"\s*</think>.*<think>.*</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Turn:
    """A response and its prompt, in tokens."""

    prompt: list[int]
    response: list[int]
    """What is sampled, with the token that ends it."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """A response and its prompt, as the template writes them."""

    prompt: str
    response: str


class ChatTemplate:
    """One model's tokenizer and chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Take a tokenizer with its template, the tokens that end sampling, and variables of the template."""
        self._tokenizer = tokenizer
        self._ends = ends
        self._kwargs = kwargs or {}

    @classmethod
    def load(cls, model: str) -> ChatTemplate:
        """Load those of a local directory or a Hugging Face id. The ends are those that the sampler stops at."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, only needed here

        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False, local_files_only=True)
        ends = {tokenizer.eos_token_id, *_configured_ends(model)}
        return cls(tokenizer, frozenset(ends - {None}))

    def check(self, messages: Sequence[Message], tools: Tools) -> None:
        """Check that the template writes every field, up to the last response.

        An assistant's message is looked for where it is the last one, because templates drop the reasoning of earlier
        turns on purpose. Raises InvalidArgument, Unsupported.
        """
        if not self._tokenizer.chat_template:
            raise errors.Unsupported("the model's tokenizer has no chat template", field="messages")
        if not self._ends:
            problem = "no token ends the model's responses; set eos_token_id in its generation_config.json"
            raise errors.Unsupported(problem, field="messages")
        marked, first = mark(messages, tools), 0
        for last, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                texts = self._texts(marked.messages[: last + 1], marked.tools, last)
                marked.check(first, last, texts.prompt + texts.response)
                first = last + 1
        self._check_roles(marked)

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with variables set, as `chat_template_kwargs` of a chat completion sets them.

        Raises UnknownField for a name that is no variable: an argument of the tokenizer's.
        """
        own = {"messages", *signature(self._tokenizer.apply_chat_template).parameters}
        for name in sorted(own & kwargs.keys()):
            raise _without_effect(name)
        return self if kwargs == self._kwargs else ChatTemplate(self._tokenizer, self._ends, kwargs)

    def check_kwargs(self, conversations: Sequence[Sequence[Message]], tools: Tools) -> None:
        """Check that each variable that is set changes what the template writes of a conversation's last response.

        It must differ from what is written without the variable or, since that may be its default, with another value.
        Raises UnknownField, Unsupported.
        """
        if self._kwargs and _HARMONY in self._source(tools):
            problem = (
                "is not read when this model is served, whose prompts vLLM builds without the template; leave it out"
            )
            raise errors.Unsupported(problem, field=TEMPLATE_KWARGS)
        for name in self._kwargs:
            if not any(self._changes(name, each, tools) for each in conversations):
                raise _without_effect(name)

    def _changes(self, name: str, messages: Sequence[Message], tools: Tools) -> bool:
        last, others = len(messages) - 1, {key: value for key, value in self._kwargs.items() if key != name}
        written = self._texts(messages, tools, last)
        for kwargs in (others, {**others, name: _another(self._kwargs[name])}):
            try:
                if self.with_kwargs(kwargs)._texts(messages, tools, last) != written:  # noqa: SLF001 - of this class
                    return True
            except errors.InvalidArgument:  # the template reads the variable, and refuses the other value
                return True
        return False

    def turn(self, messages: Sequence[Message], tools: Tools) -> Turn:
        """Return the last message of a checked conversation as a response, and the others as its prompt.

        Raises InvalidArgument, Unsupported.
        """
        last = len(messages) - 1
        field = f"messages[{last}]"
        texts = self._texts(messages, tools, last)
        prompt = self._encode(texts.prompt)
        if not prompt:
            raise errors.InvalidArgument("starts with the response; a response needs a prompt", field="messages")
        self._check_ends_nowhere(messages[-1], field)
        response = self._encode(texts.response)
        end = next((index for index, token in enumerate(response) if token in self._ends), None)
        if end is not None:
            response = response[: end + 1]
            self._check_is_whole(messages, tools)
        else:
            response = self._ended(messages, tools, texts.response)
        if len(response) == 1:
            raise errors.InvalidArgument("is empty when rendered by the model's chat template", field=field)
        return Turn(prompt, response)

    @cached_property
    def _format(self) -> ContentFormat:
        return content_format(lambda messages: str(self._apply(messages, None, add_generation_prompt=True)))

    def _texts(self, messages: Sequence[Message], tools: Tools, last: int) -> _Texts:
        prompt = self._render(messages[:-1], tools, add_generation_prompt=True)
        whole = self._render(messages, tools, add_generation_prompt=False)
        opened = _OPENED_THOUGHT.search(prompt)
        if whole.startswith(prompt):
            response = whole[len(prompt) :]
            if opened is not None and _SECOND_THOUGHT.match(response):
                problem = (
                    "has a thought, which the model's chat template writes after an empty one; give it as reasoning"
                )
                raise errors.InvalidArgument(problem, field=f"messages[{last}].content")
            return _Texts(prompt, response)
        if opened is not None and whole.startswith(prompt[: opened.start()]):
            return _Texts(prompt, _in_opened_thought(messages[-1], last, whole[opened.start() :]))
        if _CLOSED_THOUGHT.search(prompt) and "reasoning" in messages[-1]:
            problem = "cannot be trained: the prompt of the model's chat template ends a thought; leave it out"
            raise errors.InvalidArgument(problem, field=f"messages[{last}].reasoning")
        message = "the model's chat template renders a response differently from the prompt for one"
        raise errors.InvalidArgument(message, field="messages")

    def _check_ends_nowhere(self, message: Message, field: str) -> None:
        """Check that no text of a response contains a token that would end it."""
        for text in _texts_in(message):
            if not self._ends.isdisjoint(self._encode(text)):
                raise errors.InvalidArgument("contains the token that ends a response", field=field)

    def _check_is_whole(self, messages: Sequence[Message], tools: Tools) -> None:
        """Check that the template writes nothing of a response after a token that ends it."""
        marked = mark(messages, tools)
        last = len(messages) - 1
        response = self._texts(marked.messages, marked.tools, last).response
        said, _ = marked.split(last, response)
        if not self._ends.isdisjoint(self._encode(said)):
            message = "is written by the model's chat template with a token inside that ends sampling"
            raise errors.InvalidArgument(message, field=f"messages[{last}]")

    def _ended(self, messages: Sequence[Message], tools: Tools, response: str) -> list[int]:
        """Return a response with the token that ends it, though the template writes none after a last message.

        Where the conversation goes on, some templates write such a token, as the start of what follows (GLM). Otherwise
        nothing but the end-of-sequence token ends sampling.
        """
        marked, last = mark(messages, tools), len(messages) - 1
        _, after = marked.split(last, self._texts(marked.messages, marked.tools, last).response)
        following = _following(marked.messages[-1])
        with suppress(errors.InvalidArgument):  # not every template takes one more message
            longer = self._render([*marked.messages, following], marked.tools, add_generation_prompt=False)
            _, then = marked.split(last, longer)
            first = self._encode(then[len(after) :])[:1] if then.startswith(after) else []
            if not self._ends.isdisjoint(first):
                return [*self._encode(response), *first]
        written = len(after) - len(after.rstrip())
        eos = self._tokenizer.eos_token_id
        return [*self._encode(response[: len(response) - written]), min(self._ends) if eos is None else eos]

    def _check_roles(self, marked: MarkedConversation) -> None:
        """Check that messages of other roles are not written as the user's or the assistant's."""
        whole = self._render(marked.messages, marked.tools, add_generation_prompt=False)
        for role in {message["role"] for message in marked.messages} - {"user", ASSISTANT}:
            index = next(index for index, message in enumerate(marked.messages) if message["role"] == role)
            for other in ("user", ASSISTANT):
                changed = [{**each, "role": other} if each["role"] == role else each for each in marked.messages]
                with suppress(errors.InvalidArgument):  # a template that refuses the other does not mistake this one
                    if self._render(changed, marked.tools, add_generation_prompt=False) == whole:
                        message = f"is {role}, which the model's chat template writes as it writes {other}"
                        raise errors.Unsupported(message, field=f"messages[{index}].role")

    def _render(self, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool) -> str:
        source = self._source(tools)
        given = as_rendered(messages, source, self._format)
        for each in given if _HARMONY in source else given[-1:]:
            # vLLM gives no template this name for the reasoning of earlier turns; gpt-oss it renders itself, with it.
            if "reasoning" in each:
                each["thinking"] = each["reasoning"]
        try:
            text = self._apply(given, tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is code that comes with the model
            problem = f"the model's chat template failed: {error}"
            raise errors.InvalidArgument(problem[:500], field="messages") from error
        if not isinstance(text, str):
            raise errors.InvalidArgument("has more than one conversation", field="messages")
        return text

    def _apply(self, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool) -> Any:
        given: Any = tools
        return self._tokenizer.apply_chat_template(
            list(messages), tools=given, tokenize=False, add_generation_prompt=add_generation_prompt, **self._kwargs
        )

    def _source(self, tools: Tools) -> str:
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found


def _configured_ends(model: str) -> list[int | None]:
    """Return the tokens that generation_config.json says end sampling, or config.json for a model without that file."""
    from transformers import AutoConfig, GenerationConfig  # noqa: PLC0415 - takes seconds, only needed here

    try:
        found = GenerationConfig.from_pretrained(model, local_files_only=True)
    except OSError:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
        found = GenerationConfig.from_model_config(config)
    ends = found.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def _without_effect(name: str) -> errors.UnknownField:
    message = "changes nothing of what the model's chat template writes here; leave it out"
    return errors.UnknownField(message, field=f"{TEMPLATE_KWARGS}.{name[:80]}")


def _another(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value} or another"
    return None if value is None else value + 1


def _in_opened_thought(message: Message, index: int, written: str) -> str:
    """Return a response to a prompt that opens a thought, of which the template has `written` another form.

    Templates such as Nemotron's write an empty thought without the line that the prompt has in it. Those such as
    DeepSeek-R1's write a response without its thought, which is put back in the form in which these models think.
    """
    if written.startswith(_START_OF_THOUGHT):
        return written.removeprefix(_START_OF_THOUGHT).lstrip("\n")
    content = "\n".join(texts_of(message["content"]))
    thought: str | None = message.get("reasoning")
    if thought is None and _END_OF_THOUGHT in content:
        thought = content.split(_END_OF_THOUGHT)[0].rpartition(_START_OF_THOUGHT)[2]
    if thought is None:
        reason = "is not set; the prompt of the model's chat template opens a thought, so give the response's reasoning"
        raise errors.InvalidArgument(reason, field=f"messages[{index}].reasoning")
    stripped = thought.strip("\n")
    return (stripped and stripped + "\n") + f"{_END_OF_THOUGHT}\n\n" + written.lstrip("\n")


def _following(message: Message) -> Message:
    """Return what may follow a response: the result of its first call, or the user's next message."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "user", "content": "next"}
    linked = {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
    return {"role": "tool", "content": "next", "name": calls[0]["function"]["name"], **linked}


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a message, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts_in(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts_in(part)

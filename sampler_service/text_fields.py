"""What of OpenAI's API is served: every field that is sent is honoured, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline import errors
from paceline.json_body import read_object
from sampler_service.engine.text import TextEndpoint

_BOTH = frozenset(
    {"model", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "max_tokens",
     "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "stop_token_ids",
     "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
     "add_special_tokens", "response_format", "structured_outputs", "allowed_token_ids", "bad_words",
     "return_token_ids", "return_tokens_as_token_ids"}
)  # fmt: skip
_FIELDS = {
    TextEndpoint.COMPLETIONS: _BOTH | {"prompt", "echo"},
    TextEndpoint.CHAT_COMPLETIONS: _BOTH
    | {"messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls",
       "reasoning_effort", "include_reasoning", "add_generation_prompt", "continue_final_message",
       "chat_template_kwargs"},
}  # fmt: skip
_MEANINGLESS = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
"""What the hosted service keeps for its own use; it changes no answer."""
_FORMATS = ("text", "json_object", "json_schema")
_CONSTRAINTS = frozenset({"json", "regex", "choice", "json_object"})
_SCALARS = (str, int, float, bool, type(None))
_TEXT_PER_TOKEN = 32
"""Characters that a token stands for at most, on average: longer texts are refused before they are tokenized."""
_MAX_DEPTH = 64


def read_body(content: bytes, endpoint: TextEndpoint, max_context_length: int) -> dict[str, Any]:
    """Parse a body and check what it has. Raises UnreadableMessage, UnknownField, InvalidArgument, SequenceTooLong."""
    if _depth(content) > _MAX_DEPTH:
        raise errors.InvalidArgument(f"is nested deeper than {_MAX_DEPTH}", field="body")
    body = read_object(content)
    if b"\\ud" in content.lower() and not _is_text(body):
        raise errors.UnreadableMessage("the body holds text that is no Unicode: half of a surrogate pair")
    given = {name: value for name, value in body.items() if value is not None and name not in _MEANINGLESS}
    for name in given:
        if name not in _FIELDS[endpoint]:
            raise errors.UnknownField("is not served; leave it out", field=name[:80])
    if given.get("echo") and given.get("logprobs") is not None:
        raise errors.Unsupported("cannot be had with logprobs; leave one of the two out", field="echo")
    _check_format(given)
    _check_messages(given.get("messages", []))
    _check_template_kwargs(given.get("chat_template_kwargs", {}))
    length = sum(map(len, _texts([given.get("messages"), given.get("prompt"), given.get("tools")])))
    if length > _TEXT_PER_TOKEN * max_context_length:
        field = "messages" if endpoint is TextEndpoint.CHAT_COMPLETIONS else "prompt"
        raise errors.SequenceTooLong(
            f"has {length} characters; the context is {max_context_length} tokens", field=field
        )
    return given


def _is_text(body: dict[str, Any]) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_format(given: dict[str, Any]) -> None:
    """See that what bounds an answer is of a kind that is enforced."""
    form = given.get("response_format", {"type": "text"})
    if not isinstance(form, dict) or form.get("type") not in _FORMATS:
        raise errors.InvalidArgument(f"takes the types {', '.join(_FORMATS)}", field="response_format")
    constraint = given.get("structured_outputs", {})
    if not isinstance(constraint, dict) or constraint.keys() - _CONSTRAINTS:
        raise errors.InvalidArgument(f"takes {', '.join(sorted(_CONSTRAINTS))}", field="structured_outputs")


def _depth(content: bytes) -> int:
    """Count brackets that are open at a time at most, those in strings too."""
    depth = deepest = 0
    for byte in content:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _check_messages(messages: Any) -> None:
    """See that messages are text: nothing is fetched for a caller."""
    if not isinstance(messages, list):
        raise errors.InvalidArgument("must be a list of messages", field="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise errors.InvalidArgument("must be an object", field=f"messages[{index}]")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise errors.Unsupported("takes text alone", field=f"messages[{index}].content")


def _check_template_kwargs(given: Any) -> None:
    if not isinstance(given, dict):
        raise errors.InvalidArgument("must be an object", field="chat_template_kwargs")
    for name, value in given.items():
        if name in {"chat_template", "tokenize"} or not isinstance(value, _SCALARS):
            raise errors.UnknownField("is not served; leave it out", field=f"chat_template_kwargs.{name[:80]}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts(part)

"""The supported fields of OpenAI's API: every field of a request is either honoured or refused by name."""

from __future__ import annotations

from typing import Any

from paceline import errors
from paceline.chat import check_length, check_messages, read_chat_body
from sampler_service.engine.protocol import TextEndpoint

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
"""Fields for the hosted service's own use. They do not affect the response, so they are ignored."""
_FORMATS = ("text", "json_object", "json_schema")
_CONSTRAINTS = frozenset({"json", "regex", "choice", "json_object"})
_SCALARS = (str, int, float, bool, type(None))


def read_body(content: bytes, endpoint: TextEndpoint, max_context_length: int) -> dict[str, Any]:
    """Parse and check a body. Raises UnreadableMessage, UnknownField, Unsupported, InvalidArgument, SequenceTooLong."""
    body = read_chat_body(content)
    given = {name: value for name, value in body.items() if value is not None and name not in _MEANINGLESS}
    for name in given:
        if name not in _FIELDS[endpoint]:
            raise errors.UnknownField("is not served; leave it out", field=name[:80])
    if given.get("echo") and given.get("logprobs") is not None:
        raise errors.Unsupported("cannot be had with logprobs; leave one of the two out", field="echo")
    _check_format(given)
    check_messages(given.get("messages", []))
    _check_template_kwargs(given.get("chat_template_kwargs", {}))
    field = "messages" if endpoint is TextEndpoint.CHAT_COMPLETIONS else "prompt"
    check_length(field, [given.get("messages"), given.get("prompt"), given.get("tools")], max_context_length)
    return given


def _check_format(given: dict[str, Any]) -> None:
    """Check that constraints on the response are of a kind that is enforced."""
    form = given.get("response_format", {"type": "text"})
    if not isinstance(form, dict) or form.get("type") not in _FORMATS:
        raise errors.InvalidArgument(f"takes the types {', '.join(_FORMATS)}", field="response_format")
    constraint = given.get("structured_outputs", {})
    if not isinstance(constraint, dict) or constraint.keys() - _CONSTRAINTS:
        raise errors.InvalidArgument(f"takes {', '.join(sorted(_CONSTRAINTS))}", field="structured_outputs")


def _check_template_kwargs(given: Any) -> None:
    if not isinstance(given, dict):
        raise errors.InvalidArgument("must be an object", field="chat_template_kwargs")
    for name, value in given.items():
        if name in {"chat_template", "tokenize"} or not isinstance(value, _SCALARS):
            raise errors.UnknownField("is not served; leave it out", field=f"chat_template_kwargs.{name[:80]}")

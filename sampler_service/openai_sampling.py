"""Reads from the body of a call of OpenAI's API what it asks to be sampled, as parameters that every API has.

vLLM's serving layer gets only the other fields of a body, so that a parameter is read, checked and mapped in one place,
and what a call leaves out has the same meaning as in any other API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline import errors
from paceline.types import SamplingParams
from paceline.types.sampling import unsigned_seed
from sampler_service.engine.protocol import TextEndpoint, TextSampling

LIMITS_OF_TOKENS = ("max_completion_tokens", "max_tokens")
"""Names of the most tokens of a completion, by what they are called in chats first."""

SAMPLED = frozenset(
    {*LIMITS_OF_TOKENS, "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
     "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words",
     "allowed_token_ids", "prompt_logprobs"}
)  # fmt: skip
"""Fields that are read here only. `n`, `logprobs` and `top_logprobs` also say how the layer writes an answer."""

MAX_ALLOWED = 16384
"""Most ids in `allowed_token_ids`."""
_MAX_TOKENS = 16
"""Most tokens of a text's completion in OpenAI's API; a chat's have no limit but the context."""


def read_sampling(given: Mapping[str, Any], endpoint: TextEndpoint) -> TextSampling:
    """Return what a body without nulls asks to be sampled. Raises InvalidArgument for a value of a wrong type."""
    is_chat = endpoint is TextEndpoint.CHAT_COMPLETIONS
    limits = [_integer(given, name) for name in LIMITS_OF_TOKENS if name in given]
    if len(set(limits)) > 1:
        raise errors.InvalidArgument("differs from max_completion_tokens; send one of them", field="max_tokens")
    params = SamplingParams(
        max_tokens=limits[0] if limits else None if is_chat else _MAX_TOKENS,
        temperature=_number(given, "temperature", 1.0),
        top_p=_number(given, "top_p", 1.0),
        top_k=_top_k(given),
        min_p=_number(given, "min_p", 0.0),
        seed=unsigned_seed(_integer(given, "seed")) if "seed" in given else None,
        stop=_list(given, "stop", str),
        stop_token_ids=_list(given, "stop_token_ids", int),
        ignore_eos=_flag(given, "ignore_eos"),
        min_tokens=_integer(given, "min_tokens"),
    )
    return TextSampling(
        params=params,
        num_samples=_integer(given, "n", 1),
        topk_logprobs=_topk_of_chat(given) if is_chat else _topk(given, "logprobs"),
        prompt_logprobs=_topk(given, "prompt_logprobs"),
        frequency_penalty=_number(given, "frequency_penalty", 0.0),
        presence_penalty=_number(given, "presence_penalty", 0.0),
        repetition_penalty=_number(given, "repetition_penalty", 1.0),
        logit_bias=_logit_bias(given),
        bad_words=_list(given, "bad_words", str),
        allowed_token_ids=_allowed(given),
    )


def count_prompts(given: Mapping[str, Any]) -> int:
    """Return the number of prompts in a body: a chat is one, and so is a list of token ids."""
    prompt = given.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


@contextmanager
def named_as_sent(given: Mapping[str, Any]) -> Iterator[None]:
    """Name fields in errors as the body does."""
    limit = next((name for name in LIMITS_OF_TOKENS if name in given), "max_tokens")
    constraint = "response_format" if "response_format" in given else "structured_outputs"
    names = {
        "num_samples": "n",
        "topk_logprobs": "top_logprobs" if "messages" in given else "logprobs",
        "topk_prompt_logprobs": "prompt_logprobs",
        "max_tokens": limit,
        "json_schema": constraint,
        "regex": constraint,
    }
    try:
        yield
    except errors.PacelineError as error:
        name = error.field.removeprefix("params.")
        error.field = names.get(name, name)
        raise


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number; JSON's may be whole ones of any size, which are checked before they are converted."""
    value: float = given.get(name, default)
    if not _is_a(float, value):
        raise errors.InvalidArgument.must_be("a number", name)
    return value


def _integer(given: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = given.get(name, default)
    if not _is_a(int, value):
        raise errors.InvalidArgument.must_be("a whole number", name)
    return int(value)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise errors.InvalidArgument.must_be("true or false", name)
    return value


def _list(given: Mapping[str, Any], name: str, kind: type[str | int]) -> list[Any]:
    """Return a list of strings or token ids; a single string is a list of one."""
    values = given.get(name, [])
    values = [values] if kind is str and isinstance(values, str) else values
    if not isinstance(values, list) or not all(_is_a(kind, value) for value in values):
        what = "strings" if kind is str else "token ids"
        raise errors.InvalidArgument.must_be(f"a list of {what}", name)
    return values


def _is_a(kind: type[str | int | float], value: object) -> bool:
    """Return whether a value is of a kind; a whole number is also a number, but true and false are neither."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _top_k(given: Mapping[str, Any]) -> int:
    """Return top_k, 0 for -1, with which vLLM's clients switch it off."""
    value = _integer(given, "top_k")
    return 0 if value == -1 else value


def _topk(given: Mapping[str, Any], name: str) -> int | None:
    return _integer(given, name) if name in given else None


def _topk_of_chat(given: Mapping[str, Any]) -> int | None:
    top = _integer(given, "top_logprobs")
    if _flag(given, "logprobs"):
        return top
    if top:
        raise errors.InvalidArgument("needs logprobs to be true", field="top_logprobs")
    return None


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    biases = given.get("logit_bias", {})
    if not isinstance(biases, dict):
        raise errors.InvalidArgument.must_be("an object: token ids with what is added to their logits", "logit_bias")
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 20 and str(int(token)) == token):
            raise errors.InvalidArgument(f"has {token[:40]}, which is no token id", field="logit_bias")
        if not _is_a(float, bias):
            raise errors.InvalidArgument.must_be("numbers by token ids", f"logit_bias[{token}]")
    return {int(token): bias for token, bias in biases.items()}


def _allowed(given: Mapping[str, Any]) -> list[int]:
    tokens = _list(given, "allowed_token_ids", int)
    if "allowed_token_ids" in given and not tokens:
        message = "is empty, so no token could be sampled; leave it out"
        raise errors.OutOfRange.of_length(tokens, MAX_ALLOWED, message, "allowed_token_ids")
    return tokens

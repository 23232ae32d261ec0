"""Every field that vLLM's and OpenAI's APIs have is honoured, ignored as documented, or refused by its name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from openai.resources.chat import Completions as ChatCompletions
from openai.resources.completions import Completions

from paceline.errors import UnknownField
from paceline.types import ModelInfo
from sampler_service.engine.protocol import TextEndpoint
from sampler_service.openai_sampling import SAMPLED
from sampler_service.validation import RequestLimits, read_body

MODEL = ModelInfo("tiny", max_context_length=512, vocab_size=300, dtype="float32", max_lora_rank=8, num_layers=2)
LIMITS = RequestLimits(MODEL, max_num_samples=4, max_topk=5, max_unread_tokens=100)
MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "look"}}
BASE = {
    TextEndpoint.COMPLETIONS: {"model": "tiny", "prompt": "x"},
    TextEndpoint.CHAT_COMPLETIONS: {"model": "tiny", "messages": MESSAGES},
}
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
BOTH = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "seed": -1, "stop": "x", "stop_token_ids": [3],
    "ignore_eos": True, "min_tokens": 2, "max_tokens": 3, "frequency_penalty": 1, "presence_penalty": 1,
    "repetition_penalty": 2, "logit_bias": {"3": 1}, "bad_words": ["x"], "allowed_token_ids": [3], "n": 2,
    "stream": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "add_special_tokens": False, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "x"}, "return_token_ids": True, "return_tokens_as_token_ids": True,
    "model": "run",
}  # fmt: skip
SERVED = {
    TextEndpoint.COMPLETIONS: BOTH | {"prompt": "y", "echo": True, "logprobs": 2, "prompt_logprobs": 1},
    TextEndpoint.CHAT_COMPLETIONS: BOTH
    | {"messages": [{"role": "user", "content": "y"}], "logprobs": True, "max_completion_tokens": 3, "tools": [TOOL],
       "tool_choice": "none", "parallel_tool_calls": True, "reasoning_effort": "low", "include_reasoning": False,
       "add_generation_prompt": False, "continue_final_message": True, "chat_template_kwargs": {"x": 1}},
}  # fmt: skip
"""A value of every field that is honoured; the engine refuses those that would not affect its model."""
NEEDS = {"stream_options": ({"include_usage": True}, {"stream": True}), "top_logprobs": (2, {"logprobs": True})}
"""Those that need another field beside them."""


def fields_of(endpoint, vllm):
    """Return the names of all fields that vLLM or OpenAI's client know."""
    chat = endpoint is TextEndpoint.CHAT_COMPLETIONS
    create = (ChatCompletions if chat else Completions).create
    arguments = {name for name in inspect.signature(create).parameters if not name.startswith("extra_")}
    return {*vllm[endpoint].model_fields, *arguments} - {"self", "timeout"}


@pytest.fixture(scope="module")
def vllm(vllm_here):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return {TextEndpoint.COMPLETIONS: CompletionRequest, TextEndpoint.CHAT_COMPLETIONS: ChatCompletionRequest}


@pytest.mark.parametrize("endpoint", TextEndpoint)
def test_no_field_is_accepted_without_effect(endpoint, vllm):
    def read(**body):
        found = read_body(json.dumps(BASE[endpoint] | body).encode(), endpoint, LIMITS)
        return found.fields, found.sampling

    plain, refused = read(), set()
    for name in fields_of(endpoint, vllm) | SERVED[endpoint].keys() | NEEDS.keys():
        value, beside = NEEDS.get(name, (SERVED[endpoint].get(name, 1), {}))
        try:
            given = read(**beside, **{name: value})
        except UnknownField as refusal:
            refused.add((name, refusal.field))
        else:
            assert (given == (read(**beside) if beside else plain)) == (name in IGNORED), name
    served = SERVED[endpoint].keys() | IGNORED | NEEDS.keys()
    assert all(name == field for name, field in refused)
    accepted = fields_of(endpoint, vllm) - {name for name, _ in refused}
    assert accepted <= served
    assert SERVED[endpoint].keys() - SAMPLED <= vllm[endpoint].model_fields.keys(), "vLLM ignores what it does not know"
    assert not served & {name for name, _ in refused} - {"top_logprobs"}


def test_the_ignored_fields_are_documented():
    page = (Path(__file__).parents[2] / "docs/compatibility.md").read_text()
    sentence = page[page.index("honoured or refused by name; only") :].split("are ignored")[0]
    assert sorted(sentence.split("`")[1::2]) == sorted(IGNORED)

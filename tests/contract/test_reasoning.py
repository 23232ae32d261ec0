"""Reasoning apart from answers, and fields of a chat that would have no effect."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio
from support.models.tiny_models import CHAT_TEMPLATE, EOS_ID, make_tiny_llama, make_tokenizer
from support.stacks.sampler_contract import ask, one, options_for

from paceline.errors import InvalidArgument, UnknownField, Unsupported
from sampler_service.engine.factory import create_engine
from sampler_service.engine.protocol import EngineUnfit, TextEndpoint, TextRequest
from sampler_service.openai_sampling import SAMPLED, read_sampling

pytestmark = pytest.mark.asyncio(loop_scope="session")
THINK, END = 256, 257
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "[xy]{3}"
LETTERS = [make_tokenizer().encode(letter)[0] for letter in "axy"]
THINKING = {
    "allowed_token_ids": [*LETTERS, END, EOS_ID],
    "max_tokens": 60,
    "temperature": 2.0,
    "return_token_ids": True,
}


def make_thinker(folder):
    """Save a model with tokens around its reasoning, and a template that can skip it."""
    model, config = make_tiny_llama(folder), folder / "tokenizer_config.json"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = {THINK: "<think>", END: "</think>"}
    for token in tokenizer["added_tokens"]:
        if token["id"] in names:
            token |= {"content": names[token["id"]], "special": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads(config.read_text())
    kept = {name: value for name, value in settings.items() if "pad" not in name and "bos" not in name}
    config.write_text(json.dumps(kept))
    skip = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + skip)
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(tmp_path_factory, vllm_here):
    model = make_thinker(tmp_path_factory.mktemp("thinker"))
    engine = create_engine("vllm", replace(options_for(model), reasoning_parser="deepseek_r1"))
    await engine.start()
    yield engine
    await engine.stop()


async def parts_of(engine, endpoint=TextEndpoint.CHAT_COMPLETIONS, **body):
    @asynccontextmanager
    async def place(*_):
        yield 0

    asked = {"messages": MESSAGES, **body} if endpoint is TextEndpoint.CHAT_COMPLETIONS else body
    fields = {name: value for name, value in asked.items() if name not in SAMPLED}
    sampling = read_sampling(asked, endpoint)
    request = TextRequest(endpoint, fields, sampling, None, "team", place, lambda logprobs: None)
    return [json.loads(part) async for part in engine.complete_text(request)]


async def thought(engine, **body):
    """Return the reasoning and the content of whole answers, and their tokens."""
    (answer,) = await parts_of(engine, **THINKING, **body)
    choices = answer["choices"]
    return [(one["message"]["reasoning"], one["message"]["content"], one["token_ids"]) for one in choices]


async def test_reasoning_is_apart_from_the_answer_whole_and_streamed(thinker):
    decode = make_tokenizer().decode
    ended = 0
    for seed in range(6):
        ((reasoning, content, tokens),) = await thought(thinker, seed=seed)
        chunks = await parts_of(thinker, **THINKING, seed=seed, stream=True)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        told = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")]
        if END in tokens:
            ended += 1
            at = tokens.index(END)
            before, after = (
                decode([token for token in part if token in LETTERS]) for part in (tokens[:at], tokens[at:])
            )
            assert ((reasoning or ""), (content or "").replace("</think>", "")) == (before, after)
            assert [told[0], told[1].replace("</think>", "")] == [before, after]
    assert ended


async def test_a_constraint_of_a_chat_holds_from_the_end_of_its_reasoning_on(thinker):
    constraint = {"structured_outputs": {"regex": ANSWER}}
    answers = await thought(thinker, **constraint, n=6, seed=1)
    ended = [(reasoning, content) for reasoning, content, tokens in answers if END in tokens and EOS_ID in tokens]
    assert all(re.fullmatch(ANSWER, content) for _, content in ended)
    assert any(reasoning for reasoning, _ in ended)


async def test_a_constraint_of_tokens_or_of_a_text_holds_from_the_first_token_on(thinker):
    completion = await one(thinker, ask(regex=ANSWER, max_tokens=8, seed=1))
    assert re.fullmatch(ANSWER, make_tokenizer().decode(completion.tokens[:-1]))
    constraint = {"structured_outputs": {"regex": ANSWER}}
    (answer,) = await parts_of(thinker, TextEndpoint.COMPLETIONS, prompt="a", max_tokens=8, **constraint)
    assert re.fullmatch(ANSWER, answer["choices"][0]["text"])


async def test_fields_about_reasoning_have_an_effect(thinker):
    async def prompt(**body):
        (answer,) = await parts_of(thinker, max_tokens=1, return_token_ids=True, **body)
        return answer["prompt_token_ids"]

    usual = await prompt()
    assert await prompt(reasoning_effort="none") == [*usual, THINK, END]
    assert await prompt(reasoning_effort="high") == usual
    assert await prompt(chat_template_kwargs={"enable_thinking": False}) == [*usual, THINK, END]
    for reasoning, _, _ in await thought(thinker, include_reasoning=False, n=4, seed=1):
        assert reasoning is None


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({"include_reasoning": False}, Unsupported, "include_reasoning"),
        ({"reasoning_effort": "low"}, Unsupported, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinkin": False}}, UnknownField, "chat_template_kwargs.enable_thinkin"),
        ({"chat_template_kwargs": {"messages": "x"}}, UnknownField, "chat_template_kwargs.messages"),
        ({"parallel_tool_calls": False}, InvalidArgument, "parallel_tool_calls"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
async def test_fields_without_effect_are_refused(engine, body, kind, field):
    with pytest.raises(kind) as refusal:
        await parts_of(engine, **body)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        ("reasoning_parser", "nobody", "reasoning_parser: vLLM has no parser 'nobody'; take one of"),
        ("reasoning_parser", "deepseek_r1", "reasoning_parser: 'deepseek_r1' does not fit the model's tokenizer"),
        ("tool_parser", "nobody", "tool_parser: vLLM has no parser 'nobody'; take one of"),
    ],
)
async def test_a_parser_that_cannot_be_used_is_named_at_the_start(model_path, vllm_here, setting, name, message):
    engine = create_engine("vllm", replace(options_for(model_path), **{setting: name}))
    with pytest.raises(EngineUnfit, match=re.escape(message)):
        await engine.start()

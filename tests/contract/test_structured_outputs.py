"""Structured outputs: completions constrained by a schema or a regular expression, or refused by name."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest
import xgrammar
from support.models.formulas import log_softmax
from support.models.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer
from support.stacks.sampler_contract import PROMPT, ask, complete, deltas_of, one

from paceline.errors import InvalidArgument, Unsupported
from paceline.types import StopReason

pytestmark = pytest.mark.asyncio(loop_scope="session")
with_structured_outputs = pytest.mark.parametrize("engine", ["vllm"], indirect=True)

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"rider": {"enum": ["first", "last"]}, "watts": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["rider", "watts"],
        "additionalProperties": False,
    }
)
REGEX = "(ab|cd){1,8}[0-9]{2,4}"


def text_of(completion) -> str:
    assert completion.stop_reason is StopReason.STOP
    assert completion.tokens[-1] == EOS_ID
    return make_tokenizer().decode(completion.tokens[:-1])


@pytest.mark.parametrize("field", ["json_schema", "regex"])
async def test_an_engine_enforces_a_constraint_or_refuses_it_by_name(engine, field):
    constraint = {field: {"json_schema": SCHEMA, "regex": REGEX}[field]}
    request = ask(max_tokens=100, seed=1, temperature=0.7, num_samples=3, **constraint)
    if engine.name == "hf":
        with pytest.raises(Unsupported) as failure:
            await deltas_of(engine, request)
        assert failure.value.field == f"params.{field}"
        assert engine.num_running() == 0
        return
    for completion in await complete(engine, request):
        text = text_of(completion)
        assert set(json.loads(text)) == {"rider", "watts"} if field == "json_schema" else re.fullmatch(REGEX, text)


@with_structured_outputs
@pytest.mark.parametrize("field", ["json_schema", "regex"])
async def test_the_process_that_serves_everyone_converts_no_constraint(engine, monkeypatch, field):
    def convert(*_, **__):
        raise AssertionError("converted here")

    for name in ("from_json_schema", "from_regex"):
        monkeypatch.setattr(xgrammar.Grammar, name, convert)
    given = {"json_schema": SCHEMA, "regex": REGEX}[field]
    assert text_of(await one(engine, ask(max_tokens=100, seed=5, **{field: given})))


@with_structured_outputs
async def test_logprobs_are_those_of_what_the_constraint_leaves(engine, reference):
    letters = [make_tokenizer().encode(letter)[0] for letter in "abc"]
    request = ask(regex="[abc]{6}", temperature=0.7, seed=3, max_tokens=8, topk_logprobs=4)
    completion = await one(engine, request)
    rows = reference.logits(PROMPT + completion.tokens)[len(PROMPT) - 1 : -1]
    allowed = np.full((len(rows), VOCAB_SIZE), -np.inf)
    allowed[:6, letters], allowed[6:, EOS_ID] = 0, 0
    expected = log_softmax(rows / 0.7 + allowed)
    assert len(completion.tokens) == 7
    np.testing.assert_allclose(completion.logprobs, expected[range(7), completion.tokens], atol=1e-4)
    assert set(completion.topk_ids[0]) == {*letters, -1}


@with_structured_outputs
async def test_a_constraint_bounds_its_own_request_alone(engine):
    free = {"max_tokens": 20, "seed": 6, "ignore_eos": True}
    alone = await one(engine, ask(**free))
    beside, bound = await asyncio.gather(one(engine, ask(**free)), one(engine, ask(max_tokens=20, regex="[0-9]{12}")))
    assert beside.tokens == alone.tokens
    assert re.fullmatch("[0-9]{12}", text_of(bound))


@with_structured_outputs
async def test_a_completion_that_the_constraint_does_not_let_end_in_time_has_ended_by_length(engine):
    completion = await one(engine, ask(max_tokens=5, regex="[0-9]{12}"))
    assert (len(completion.tokens), completion.stop_reason) == (5, StopReason.LENGTH)


@with_structured_outputs
@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("regex", "(ab", "parenthesis is not closed"),
        ("regex", r"(a)\1", "Backreference"),
        ("regex", "a\0", "NUL"),
        ("json_schema", '{"type": "horse"}', "Unsupported type"),
        ("json_schema", '{"$ref": "#/$defs/absent"}', "Cannot find"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "not supported"),
    ],
)
async def test_what_no_grammar_can_be_made_of_is_refused_before_anything_is_queued(engine, field, value, what):
    request = ask(max_tokens=4, prompt_logprobs=True, **{field: value})
    refused = asyncio.create_task(deltas_of(engine, request))
    while not refused.done():
        assert engine.num_running() == 0
        await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match=what) as failure:
        await refused
    assert failure.value.field == f"params.{field}"


@with_structured_outputs
async def test_a_constraint_that_crashes_xgrammar_costs_nobody_else_anything(engine):
    crashing = json.dumps({"type": "string", "pattern": "(" * 32_000 + "a" + ")" * 32_000})
    other = asyncio.create_task(one(engine, ask(max_tokens=40, seed=6, ignore_eos=True)))
    with pytest.raises(InvalidArgument, match="send a simpler one") as failure:
        await deltas_of(engine, ask(max_tokens=4, json_schema=crashing))
    assert failure.value.field == "params.json_schema"
    assert len((await other).tokens) == 40

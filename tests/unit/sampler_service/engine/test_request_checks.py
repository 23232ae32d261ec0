"""How requests are checked before an engine sees them."""

from __future__ import annotations

import json

import pytest

from paceline.errors import InvalidArgument, OutOfRange, SequenceTooLong, TokenOutOfRange
from paceline.types import ModelInfo, SamplingParams
from sampler_service.engine.request_checks import (
    MAX_NESTING,
    check_constraint,
    check_tag,
    check_tokens,
    completion_budget,
)

INFO = ModelInfo("m", max_context_length=10, vocab_size=5, dtype="float32", max_lora_rank=4, num_layers=1)


def test_tokens_must_be_in_the_vocabulary_and_leave_the_reserved_ones_free():
    check_tokens(INFO, [0, 4] * 5, "tokens")
    for error, tokens in [(TokenOutOfRange, [5]), (TokenOutOfRange, [-1]), (SequenceTooLong, [0] * 10)]:
        with pytest.raises(error) as caught:
            check_tokens(INFO, tokens, "prompt", reserved=1)
        assert caught.value.field == "prompt"


def test_the_budget_is_what_the_context_leaves():
    assert completion_budget(INFO, 4, SamplingParams()) == 6
    assert completion_budget(INFO, 4, SamplingParams(max_tokens=99)) == 6
    assert completion_budget(INFO, 4, SamplingParams(max_tokens=2, min_tokens=2)) == 2
    for params in (SamplingParams(max_tokens=0), SamplingParams(min_tokens=7)):
        with pytest.raises(OutOfRange):
            completion_budget(INFO, 4, params)


def groups(depth):
    return "(" * depth + "a" + ")" * depth


def constrained(schema):
    check_constraint(SamplingParams(json_schema=json.dumps(schema)))


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1, 32_000])
def test_expressions_whose_groups_would_crash_the_parser_are_refused(depth):
    expression, too_deep = groups(depth), depth > MAX_NESTING
    checks = [
        (lambda: constrained({"type": "string", "pattern": expression}), "params.json_schema"),
        (lambda: constrained({"type": "object", "patternProperties": {expression: {}}}), "params.json_schema"),
        (lambda: check_constraint(SamplingParams(regex=expression)), "params.regex"),
    ]
    for check, field in checks:
        if too_deep:
            with pytest.raises(InvalidArgument, match="deeply") as refusal:
                check()
            assert refusal.value.field == field
        else:
            check()


def test_parentheses_that_are_no_groups_do_not_count():
    check_constraint(SamplingParams(regex=r"\(" * 1000 + "[(]" * 1000 + "(a)" * 1000))


@pytest.mark.parametrize("bound", ["minProperties", "maxProperties"])
def test_a_number_of_many_properties_is_refused(bound):
    few, many = ({f"p{number}": {} for number in range(count)} for count in (128, 129))
    constrained({"type": "object", "properties": few, bound: 10})
    constrained({"type": "object", "properties": many})
    with pytest.raises(InvalidArgument, match=bound):
        constrained({"type": "object", "properties": {"inner": {"type": "object", "properties": many, bound: 10}}})


def test_the_schemas_of_tools_have_the_same_bounds():
    def tag(schema):
        content = {"type": "json_schema", "json_schema": schema}
        return json.dumps({"format": {"type": "triggered_tags", "tags": [{"begin": "<f>", "content": content}]}})

    check_tag(tag({"type": "string", "pattern": groups(MAX_NESTING)}), "tools")
    many = {f"p{number}": {} for number in range(129)}
    for schema in (
        {"type": "string", "pattern": groups(1000)},
        {"type": "object", "properties": many, "minProperties": 9},
    ):
        with pytest.raises(InvalidArgument) as refusal:
            check_tag(tag(schema), "tools")
        assert refusal.value.field == "tools"

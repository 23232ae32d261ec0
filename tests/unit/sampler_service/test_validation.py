"""What a sampler refuses before it does anything."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from paceline import errors
from paceline.layout import new_run_id
from paceline.types import ModelInfo, ModelRef, SamplingParams
from sampler_service.engine.protocol import TextEndpoint
from sampler_service.validation import (
    RequestLimits,
    SampleRequest,
    check_adapter_ref,
    check_ref,
    check_sample,
    read_body,
)

MODEL = ModelInfo("tiny", max_context_length=32, vocab_size=100, dtype="float32", max_lora_rank=8, num_layers=2)
LIMITS = RequestLimits(MODEL, max_num_samples=4, max_topk=5, max_unread_tokens=100)
RUN = new_run_id()
MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "look"}}


def request(length=8, **fields):
    return SampleRequest(ModelRef(), np.arange(length, dtype=np.int32), SamplingParams(), **fields)


def with_params(**fields):
    return replace(request(), params=SamplingParams(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 24},
        {"temperature": 0.0},
        {"temperature": float(np.float32(0.01))},
        {"temperature": 2.0},
        {"top_p": 1e-3, "top_k": 100, "min_p": 1.0},
        {"seed": 2**64 - 1},
        {"stop": ("\n",), "stop_token_ids": (0, 99)},
        {"min_tokens": 24},
        {"min_tokens": 3, "max_tokens": 3},
        {"regex": "[a-z]{2,9}", "stop": ("\n",), "max_tokens": 4},
        {"json_schema": '{"type": "object", "properties": {"not": {"enum": ["if"]}, "a": {"$ref": "#/$defs/a"}}}'},
        {"json_schema": '{"$defs": {"a": {"type": "string", "minLength": 1}}, "anyOf": [{"const": {"not": 1}}]}'},
    ],
)
def test_what_can_be_honoured_is_taken(fields):
    check_sample(with_params(**fields), LIMITS)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"max_tokens": 0}, errors.OutOfRange, "params.max_tokens"),
        ({"max_tokens": 25}, errors.SequenceTooLong, "params.max_tokens"),
        ({"min_tokens": 25}, errors.OutOfRange, "params.min_tokens"),
        ({"min_tokens": 4, "max_tokens": 3}, errors.OutOfRange, "params.min_tokens"),
        ({"temperature": -0.1}, errors.OutOfRange, "params.temperature"),
        ({"temperature": 2.1}, errors.OutOfRange, "params.temperature"),
        ({"temperature": 0.005}, errors.OutOfRange, "params.temperature"),
        ({"temperature": math.nan}, errors.NonFinite, "params.temperature"),
        ({"temperature": math.inf}, errors.NonFinite, "params.temperature"),
        ({"top_p": 0.0}, errors.OutOfRange, "params.top_p"),
        ({"top_p": 1.1}, errors.OutOfRange, "params.top_p"),
        ({"top_p": math.nan}, errors.NonFinite, "params.top_p"),
        ({"min_p": -0.1}, errors.OutOfRange, "params.min_p"),
        ({"min_p": 1.1}, errors.OutOfRange, "params.min_p"),
        ({"min_p": math.nan}, errors.NonFinite, "params.min_p"),
        ({"top_k": 101}, errors.OutOfRange, "params.top_k"),
        ({"seed": 2**64}, errors.OutOfRange, "params.seed"),
        ({"stop": ("",)}, errors.OutOfRange, "params.stop[0]"),
        ({"stop": ("a", "b" * 2000)}, errors.OutOfRange, "params.stop[1]"),
        ({"stop": ("a",) * 65}, errors.OutOfRange, "params.stop"),
        ({"stop_token_ids": (3, 100)}, errors.TokenOutOfRange, "params.stop_token_ids[1]"),
        ({"json_schema": "{}", "regex": "a"}, errors.InvalidArgument, "params.regex"),
        ({"regex": "a" * 70_000}, errors.OutOfRange, "params.regex"),
        ({"json_schema": "{}" + " " * 70_000}, errors.OutOfRange, "params.json_schema"),
        ({"regex": "a+", "ignore_eos": True}, errors.InvalidArgument, "params.ignore_eos"),
        ({"json_schema": "{}", "min_tokens": 1}, errors.InvalidArgument, "params.min_tokens"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused(fields, error, field):
    with pytest.raises(error) as failure:
        check_sample(with_params(**fields), LIMITS)
    assert failure.value.field == field


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("true", "must be a JSON object"),
        ('{"items":' * 6000, "nested too deeply"),
        ('{"items":' * 128 + "[]" + "}" * 128, "nested too deeply"),
        ('{"enum":' + "[" * 128 + "]" * 128 + "}", "nested too deeply"),
        ('{"not": {"type": "string"}}', "has not, which is not enforced"),
        ('{"properties": {"a": {"anyOf": [{"if": {}, "then": {}}]}}}', "has if, which is not enforced"),
        ('{"type": "object", "patternProperties": {"a": {"dependentRequired": {}}}}', "dependentRequired"),
        ('{"items": {"minimum": 3}}', "has minimum without a type"),
        ('{"$ref": "https://example.org/schema"}', "not a path within the schema"),
        ('{"$defs": {"a": {"$ref": "#a"}}}', "not a path within the schema"),
        ('{"$ref": 3}', "not a path within the schema"),
    ],
)
def test_a_schema_that_would_not_be_enforced_whole_is_refused(schema, what):
    with pytest.raises(errors.InvalidArgument, match=what) as failure:
        check_sample(with_params(json_schema=schema), LIMITS)
    assert failure.value.field == "params.json_schema"


@pytest.mark.parametrize(
    "schema",
    [
        '{"items":' * 127 + "{}" + "}" * 127,
        '{"const": "' + "[{" * 200 + '\\\\\\"' + "[{" * 200 + '"}',
    ],
    ids=["as deep as may be", "brackets in strings"],
)
def test_a_schema_that_is_not_too_deep_is_taken(schema):
    check_sample(with_params(json_schema=schema), LIMITS)


@pytest.mark.parametrize(
    ("changed", "error", "field"),
    [
        (request(num_samples=0), errors.OutOfRange, "num_samples"),
        (request(num_samples=5), errors.OutOfRange, "num_samples"),
        (request(topk_logprobs=6), errors.OutOfRange, "topk_logprobs"),
        (request(topk_prompt_logprobs=6), errors.OutOfRange, "topk_prompt_logprobs"),
        (request(length=32), errors.SequenceTooLong, "prompt"),
        (replace(request(), prompt=np.array([-1], np.int64)), errors.TokenOutOfRange, "prompt"),
        (replace(request(), prompt=np.array([100], np.int64)), errors.TokenOutOfRange, "prompt"),
        (replace(request(), prompt=np.array([2**40], np.int64)), errors.TokenOutOfRange, "prompt"),
        (replace(request(), ref=ModelRef(base="another")), errors.ModelNotFound, "model.base.name"),
    ],
)
def test_requests_beyond_the_limits_are_refused(changed, error, field):
    with pytest.raises(error) as failure:
        check_sample(changed, LIMITS)
    assert failure.value.field == field


def text(endpoint=TextEndpoint.COMPLETIONS, limits=LIMITS, **body):
    body = {"prompt": "x"} | body if endpoint is TextEndpoint.COMPLETIONS else {"messages": MESSAGES} | body
    return read_body(json.dumps({"model": "tiny", **body}).encode(), endpoint, limits)


@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        ({"n": 5}, errors.OutOfRange, "n"),
        ({"n": 0}, errors.OutOfRange, "n"),
        ({"n": "2"}, errors.InvalidArgument, "n"),
        ({"n": True}, errors.InvalidArgument, "n"),
        ({"prompt": ["x"] * 5}, errors.OutOfRange, "prompt"),
        ({"prompt": [[1]] * 3, "n": 2}, errors.OutOfRange, "prompt"),
        ({"logprobs": 6}, errors.OutOfRange, "logprobs"),
        ({"logprobs": -1}, errors.OutOfRange, "logprobs"),
        ({"logprobs": True}, errors.InvalidArgument, "logprobs"),
        ({"prompt_logprobs": 6}, errors.OutOfRange, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, errors.OutOfRange, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, errors.Unsupported, "prompt_logprobs"),
        ({"temperature": 0.005}, errors.OutOfRange, "temperature"),
        ({"temperature": 10**400}, errors.OutOfRange, "temperature"),
        ({"temperature": math.nan}, errors.NonFinite, "temperature"),
        ({"temperature": "0.5"}, errors.InvalidArgument, "temperature"),
        ({"temperature": False}, errors.InvalidArgument, "temperature"),
        ({"top_p": 0}, errors.OutOfRange, "top_p"),
        ({"top_k": -2}, errors.OutOfRange, "top_k"),
        ({"min_p": 2}, errors.OutOfRange, "min_p"),
        ({"seed": -(2**63) - 1}, errors.OutOfRange, "seed"),
        ({"seed": 2**64}, errors.OutOfRange, "seed"),
        ({"seed": 1.5}, errors.InvalidArgument, "seed"),
        ({"max_tokens": 0}, errors.OutOfRange, "max_tokens"),
        ({"max_tokens": 32}, errors.SequenceTooLong, "max_tokens"),
        ({"min_tokens": 17}, errors.OutOfRange, "min_tokens"),
        ({"stop": "x" * 1025}, errors.OutOfRange, "stop[0]"),
        ({"stop": ["x"] * 65}, errors.OutOfRange, "stop"),
        ({"stop": [None]}, errors.InvalidArgument, "stop"),
        ({"stop": [3]}, errors.InvalidArgument, "stop"),
        ({"stop_token_ids": [3, 100]}, errors.TokenOutOfRange, "stop_token_ids[1]"),
        ({"stop_token_ids": ["a"]}, errors.InvalidArgument, "stop_token_ids"),
        ({"ignore_eos": 1}, errors.InvalidArgument, "ignore_eos"),
        ({"frequency_penalty": 2.1}, errors.OutOfRange, "frequency_penalty"),
        ({"presence_penalty": -2.1}, errors.OutOfRange, "presence_penalty"),
        ({"repetition_penalty": 1e-300}, errors.OutOfRange, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, errors.OutOfRange, "repetition_penalty"),
        ({"logit_bias": {"3": 100.5}}, errors.OutOfRange, "logit_bias"),
        ({"logit_bias": {"3": math.inf}}, errors.NonFinite, "logit_bias"),
        ({"logit_bias": {"3": "1"}}, errors.InvalidArgument, "logit_bias[3]"),
        ({"logit_bias": {"three": 1}}, errors.InvalidArgument, "logit_bias"),
        ({"logit_bias": {"03": 1}}, errors.InvalidArgument, "logit_bias"),
        ({"logit_bias": {"100": 1}}, errors.TokenOutOfRange, "logit_bias[0]"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, errors.OutOfRange, "logit_bias"),
        ({"bad_words": ["x"] * 65}, errors.OutOfRange, "bad_words"),
        ({"bad_words": [""]}, errors.OutOfRange, "bad_words[0]"),
        ({"allowed_token_ids": []}, errors.InvalidArgument, "allowed_token_ids"),
        ({"allowed_token_ids": [100]}, errors.TokenOutOfRange, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1] * 16385}, errors.OutOfRange, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, errors.InvalidArgument, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, errors.InvalidArgument, "min_tokens"),
        ({"response_format": {"type": "text", "schema": {}}}, errors.UnknownField, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "scheme": {}}}},
            errors.UnknownField,
            "response_format.json_schema.scheme",
        ),
        ({"response_format": {"type": "json_schema"}}, errors.MissingField, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         errors.MissingField, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         errors.MissingField, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}},
         errors.InvalidArgument, "response_format.json_schema.strict"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "extra": 1}}},
         errors.UnknownField, "response_format.json_schema.extra"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
         errors.InvalidArgument, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, errors.UnknownField, "response_format.schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         errors.InvalidArgument, "structured_outputs"),
        ({"structured_outputs": {}}, errors.InvalidArgument, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, errors.InvalidArgument, "structured_outputs"),
        ({"structured_outputs": {"grammar": "a"}}, errors.UnknownField, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": 3}}, errors.InvalidArgument, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, errors.EmptyBatch, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [3]}}, errors.InvalidArgument, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, errors.InvalidArgument, "structured_outputs.json_object"),
        ({"stream_options": {"include_usage": True}}, errors.InvalidArgument, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, errors.UnknownField, "stream_options.usage"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}},
         errors.InvalidArgument, "stream_options.include_usage"),
        ({"best_of": 2}, errors.UnknownField, "best_of"),
        ({"use_beam_search": True}, errors.UnknownField, "use_beam_search"),
        ({"length_penalty": 2.0}, errors.UnknownField, "length_penalty"),
        ({"truncate_prompt_tokens": 2}, errors.UnknownField, "truncate_prompt_tokens"),
        ({"logprob_token_ids": [1]}, errors.UnknownField, "logprob_token_ids"),
    ],
)  # fmt: skip
def test_the_limits_hold_for_the_bodies_of_openai_s_api(body, error, field):
    with pytest.raises(error) as failure:
        text(**body)
    assert failure.value.field == field


@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        ({"logprobs": True, "top_logprobs": 6}, errors.OutOfRange, "top_logprobs"),
        ({"top_logprobs": 2}, errors.InvalidArgument, "top_logprobs"),
        ({"logprobs": 3}, errors.InvalidArgument, "logprobs"),
        ({"max_completion_tokens": 32}, errors.SequenceTooLong, "max_completion_tokens"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, errors.InvalidArgument, "max_tokens"),
        ({"prompt_logprobs": 1}, errors.UnknownField, "prompt_logprobs"),
        ({"messages": []}, errors.EmptyBatch, "messages"),
        ({"tools": []}, errors.EmptyBatch, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "look", "strict": True}}], "ignore_eos": True},
            errors.InvalidArgument,
            "ignore_eos",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 2}, errors.InvalidArgument, "min_tokens"),
        ({"tools": [TOOL], "parallel_tool_calls": False, "ignore_eos": True}, errors.InvalidArgument, "ignore_eos"),
    ],
)
def test_the_limits_hold_for_chats(body, error, field):
    with pytest.raises(error) as failure:
        text(TextEndpoint.CHAT_COMPLETIONS, **body)
    assert failure.value.field == field


def test_a_signed_seed_is_a_seed_of_its_own():
    seeds = [text(seed=seed).sampling.params.seed for seed in (-(2**63), -1, 0, 2**63 - 1, 2**64 - 1)]
    assert seeds == [2**63, 2**64 - 1, 0, 2**63 - 1, 2**64 - 1]


def test_a_body_that_leaves_everything_out_and_one_of_nulls_mean_the_same():
    nothing = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs", "max_tokens"))
    for endpoint, most in ((TextEndpoint.COMPLETIONS, 16), (TextEndpoint.CHAT_COMPLETIONS, None)):
        plain = text(endpoint).sampling
        assert plain == text(endpoint, **nothing).sampling
        assert plain.params == SamplingParams(max_tokens=most)
        assert (plain.repetition_penalty, plain.frequency_penalty, plain.presence_penalty) == (1, 0, 0)


def test_the_serving_layer_gets_nothing_that_says_how_to_sample():
    sampling = {"temperature": 0.5, "top_k": -1, "seed": 3, "stop": "a", "max_tokens": 4, "logit_bias": {"7": -2}}
    body = text(**sampling, n=2, skip_special_tokens=False)
    assert body.fields == {"model": "tiny", "prompt": "x", "n": 2, "skip_special_tokens": False}
    assert body.sampling.params == SamplingParams(temperature=0.5, seed=3, stop=["a"], max_tokens=4)
    assert (body.sampling.num_samples, body.sampling.logit_bias) == (2, {7: -2})


def test_log_probabilities_that_no_message_holds_are_refused_before_they_are_sampled():
    roomy = RequestLimits(replace(MODEL, max_context_length=2**20), 64, 20, 100)
    with pytest.raises(errors.OutOfRange, match="MiB of the answer") as failure:
        text(limits=roomy, n=64, logprobs=20, max_tokens=4096)
    assert failure.value.field == "logprobs"
    text(limits=roomy, n=64, logprobs=20, max_tokens=4096, stream=True)
    text(limits=roomy, n=4, logprobs=20, max_tokens=4096)
    large = request(num_samples=64, topk_logprobs=20)
    with pytest.raises(errors.OutOfRange, match="MiB of the answer") as failure:
        check_sample(large, roomy)
    assert failure.value.field == "topk_logprobs"
    check_sample(replace(large, params=SamplingParams(max_tokens=4096)), roomy)


def test_a_prompt_may_leave_room_for_a_single_token():
    check_sample(request(length=31), LIMITS)


@pytest.mark.parametrize(
    ("ref", "error"),
    [
        (ModelRef(run_id="../../etc"), errors.RunNotFound),
        (ModelRef(run_id="run-1"), errors.RunNotFound),
        (ModelRef(checkpoint=f"paceline://{RUN}/sampler/../x"), errors.InvalidPath),
        (ModelRef(checkpoint="/etc/passwd"), errors.InvalidPath),
        (ModelRef(checkpoint=f"paceline://{RUN}/state/best"), errors.InvalidPath),
    ],
)
def test_names_that_are_no_names_reach_no_path(ref, error):
    with pytest.raises(error):
        check_ref(ref, MODEL)


def test_the_base_model_is_no_adapter():
    check_adapter_ref(ModelRef(run_id=RUN), MODEL)
    with pytest.raises(errors.InvalidArgument):
        check_adapter_ref(ModelRef(base="tiny"), MODEL)


@pytest.mark.parametrize("bad", [-1, 100])
def test_a_token_out_of_range_is_named_with_its_position_and_the_vocabulary(bad):
    prompt = np.array([1, 2, bad, 3], dtype=np.int32)
    told = f"holds {bad} at position 2; the vocabulary has 100 tokens, with ids from 0 to 99$"
    with pytest.raises(errors.TokenOutOfRange, match=told) as caught:
        check_sample(replace(request(), prompt=prompt), LIMITS)
    assert caught.value.field == "prompt"
    assert caught.value.metadata == {"value": str(bad), "minimum": "0", "maximum": "99"}


def test_a_range_of_one_number_is_told_as_that_number():
    one = RequestLimits(MODEL, max_num_samples=1, max_topk=0, max_unread_tokens=100)
    with pytest.raises(errors.OutOfRange, match=r"it must be 0$"):
        check_sample(request(topk_logprobs=1), one)
    with pytest.raises(errors.OutOfRange, match=r"give 1$"):
        check_sample(request(num_samples=2), one)


def test_another_base_model_is_refused_with_what_to_name_instead():
    with pytest.raises(errors.ModelNotFound, match="tiny is served: give that name, or none"):
        check_ref(ModelRef("other"), MODEL)

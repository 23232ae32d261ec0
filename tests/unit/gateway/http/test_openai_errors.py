"""Errors as OpenAI's clients know them."""

from __future__ import annotations

import json

import pytest

from gateway.http.openai_errors import UnknownUrl, WrongMethod, is_openai, openai_error
from gateway.http.problems import problem
from paceline import errors

CODES = {
    errors.InvalidApiKey("x"): (401, "invalid_api_key", "invalid_request_error"),
    errors.RunNotFound("x"): (404, "model_not_found", "invalid_request_error"),
    errors.VersionNotFound("x"): (404, "model_not_found", "invalid_request_error"),
    errors.CheckpointNotFound("x"): (404, "model_not_found", "invalid_request_error"),
    errors.SequenceTooLong("x"): (400, "context_length_exceeded", "invalid_request_error"),
    errors.Unsupported("x"): (400, "unsupported_value", "invalid_request_error"),
    errors.Overloaded("x"): (429, "rate_limit_exceeded", "requests"),
    errors.QuotaExceeded("x", metadata={"quota": "runs"}): (429, "insufficient_quota", "insufficient_quota"),
    errors.QuotaExceeded("x", metadata={"quota": "runs"}, retry_after=1): (429, "rate_limit_exceeded", "requests"),
    errors.QuotaExceeded("x", metadata={"quota": "tokens"}, retry_after=1): (429, "rate_limit_exceeded", "tokens"),
    errors.UnknownField("x", field="audio"): (400, "unsupported_parameter", "invalid_request_error"),
    errors.UnknownField("x", field="colour"): (400, "unknown_parameter", "invalid_request_error"),
    errors.UnknownField("x", field="stream_options.include_obfuscation"): (
        400,
        "unsupported_parameter",
        "invalid_request_error",
    ),
    errors.InvalidArgument.must_be("a number", "top_p"): (400, "invalid_type", "invalid_request_error"),
    errors.EmptyBatch("x"): (400, "empty_array", "invalid_request_error"),
    WrongMethod("x"): (405, "method_not_supported", "invalid_request_error"),
    errors.MessageTooLarge("x"): (413, None, "invalid_request_error"),
    errors.EngineUnavailable("x"): (503, None, "server_error"),
    errors.TimedOut("x"): (504, None, "server_error"),
    errors.Internal("x"): (500, None, "server_error"),
}


@pytest.mark.parametrize("error", CODES, ids=repr)
def test_an_error_is_one_of_openais(error):
    answer = problem(error, "/v1/chat/completions")
    told = json.loads(answer.body)["error"]
    assert (answer.status_code, told["code"], told["type"]) == CODES[error]
    assert told["reason"] == error.reason
    assert told["message"]


def test_every_error_is_known_to_openais_clients():
    for kind in errors.CATALOG.values():
        assert openai_error(kind("x")).kind


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/v1/models", True),
        ("/v1/models/run-1@2", True),
        ("/v1/completions", True),
        ("/weights/policy/v1/chat/completions", True),
        ("/v1/train/optim_step", False),
        ("/weights/policy/generate", False),
        ("/train", False),
    ],
)
def test_only_calls_of_openais_api_answer_in_its_way(path, is_one):
    assert is_openai(path) == is_one
    code = json.loads(problem(errors.RunNotFound("x"), path).body)["error"]["code"]
    assert code == ("model_not_found" if is_one else "RUN_NOT_FOUND")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/embeddings", "unknown_url"),
        ("/v1/responses/1", "unknown_url"),
        ("/weights/policy/v1/nothing", "unknown_url"),
        ("/nothing", "UNIMPLEMENTED"),
        ("/api/v1/nothing", "UNIMPLEMENTED"),
    ],
)
def test_a_path_that_no_api_has_is_told_as_by_openai_below_v1(path, code):
    answer = problem(UnknownUrl("x"), path, 404)
    error = json.loads(answer.body)["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({"value": "1000", "minimum": "0", "maximum": "20"}, "integer_above_max_value"),
        ({"value": "-1", "minimum": "0", "maximum": "20"}, "integer_below_min_value"),
        ({"value": "3", "minimum": "0.0", "maximum": "2.0"}, "decimal_above_max_value"),
        ({"value": "-0.5", "minimum": "0.0", "maximum": "2.0"}, "decimal_below_min_value"),
        ({"length": "65", "maximum": "64", "of": "array"}, "array_above_max_length"),
        ({"length": "0", "maximum": "64", "of": "array"}, "empty_array"),
        ({"length": "1025", "maximum": "1024", "of": "string"}, "string_above_max_length"),
        ({"length": "0", "maximum": "1024", "of": "string"}, "empty_string"),
        ({}, "invalid_value"),
    ],
)
def test_a_number_or_length_out_of_range_is_told_by_its_kind_and_side(metadata, code):
    assert openai_error(errors.OutOfRange("x", metadata=metadata)).code == code

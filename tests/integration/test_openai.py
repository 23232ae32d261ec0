"""OpenAI's own client against vLLM, through the gateway's HTTP port."""

from __future__ import annotations

import copy
import hashlib
import json

import httpx
import jsonschema
import openai
import pytest
from support.models.tiny_models import make_tiny_llama, make_tokenizer
from support.stacks.cluster import Cluster, wait_for

import paceline
from paceline import AdamParams, Datum, SamplingParams
from paceline.files.key_changes import add_key

pytestmark = pytest.mark.services
PROMPT = "Country: Peru\nCapital:"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"ok": true}'}}


NO_SPACE = {str(make_tokenizer().encode(space)[0]): -100 for space in " \t\n\r"}
"""A bias against space between the tokens of JSON, of which random models write much."""
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai")
    model = make_tiny_llama(folder / "model", context=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    cluster = Cluster.make(folder / "state", model, engine="vllm", PACELINE_GATEWAY_HTTP_ALIASES="gpt-nothing")
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def address(cluster):
    return f"http://{cluster.gateway.plan.environment['PACELINE_GATEWAY_HTTP_LISTEN']}/v1"


@pytest.fixture(scope="module")
def client(cluster, address):
    return openai.OpenAI(base_url=address, api_key=cluster.api_key, max_retries=0)


@pytest.fixture(scope="module")
def run(cluster):
    """A run with two versions, and a checkpoint of the second."""
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        training = service.create_lora_training_client(rank=8, seed=1)
        for _ in range(2):
            training.forward_backward([Datum.from_completion(list(PROMPT.encode()), list(b" Lima"))])
            training.optim_step(AdamParams(learning_rate=3e-2))
            training.publish_weights(durable=True).result()
        checkpoint = training.save_weights_for_sampler("mine").result().path
        return training.run_id, checkpoint


def headers(cluster):
    return {"Authorization": f"Bearer {cluster.api_key}"}


def events_of(address, cluster, path, body):
    """Return a stream's events, as a client reads them that takes every end of a line in Unicode for one."""
    answer = httpx.post(f"{address}{path}", json=body | {"stream": True}, headers=headers(cluster), timeout=60)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def greedy(client, model, **more):
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=6, temperature=0, **more)


def test_models_are_the_base_model_runs_with_versions_and_checkpoints(client, run):
    run_id, checkpoint = run
    assert [model.id for model in client.models.list()] == ["model", "gpt-nothing", run_id, checkpoint]
    assert client.models.retrieve(f"{run_id}@1").id == f"{run_id}@1"
    assert client.models.retrieve(checkpoint).id == checkpoint
    tinkers = checkpoint.replace("paceline://", "tinker://").replace("/sampler/", "/sampler_weights/")
    assert client.models.retrieve(tinkers).sha256 == client.models.retrieve(checkpoint).sha256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_name_says_which_weights_answer_and_the_answer_says_which_did(cluster, client, run, service):
    run_id, checkpoint = run

    def tokens_of(**names):
        sampling = service.create_sampling_client(**names)
        params = SamplingParams(max_tokens=6, temperature=0)
        return list(sampling.sample(list(PROMPT.encode()), 1, params).result().sequences[0].tokens)

    asked = {
        "model": {},
        "gpt-nothing": {},
        run_id: {"run_id": run_id},
        f"{run_id}@newest": {"run_id": run_id},
        f"{run_id}@1": {"run_id": run_id, "version": 1},
        checkpoint: {"model_path": checkpoint},
    }
    versions = {}
    for name, meant in asked.items():
        raw = client.completions.with_raw_response.create(
            model=name,
            prompt=list(PROMPT.encode()),
            max_tokens=6,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        answer = raw.parse()
        assert answer.model == name
        assert answer.choices[0].token_ids == tokens_of(**meant), name
        told = {key: value for key, value in raw.headers.items() if key.startswith("x-paceline")}
        versions[name] = told.get("x-paceline-version"), told.get("x-paceline-checkpoint")
        assert ("x-paceline-blake3" in told) == bool(meant)
    assert versions == {
        "model": (None, None),
        "gpt-nothing": (None, None),
        run_id: ("2", None),
        f"{run_id}@newest": ("2", None),
        f"{run_id}@1": ("1", None),
        checkpoint: (None, checkpoint),
    }


def test_the_newest_version_moves_with_publishing(client, service):
    training = service.create_lora_training_client(rank=4)
    told = []
    for _ in range(2):
        training.publish_weights().result()
        told.append(client.completions.with_raw_response.create(model=training.run_id, prompt="a", max_tokens=1))
    assert [raw.headers["x-paceline-version"] for raw in told] == ["1", "2"]


def test_names_answer_while_the_trainer_is_away(cluster, client, service, run):
    training = service.create_lora_training_client(rank=4, user_metadata={"name": "policy"})
    training.publish_weights(durable=True, wait_for="any").result()
    assert greedy(client, "policy").model == "policy"
    newer = service.create_lora_training_client(rank=4, user_metadata={"name": "policy"})
    newer.publish_weights(durable=True, wait_for="any").result()
    raw = client.completions.with_raw_response.create(model="policy", prompt=PROMPT, max_tokens=1)
    assert raw.headers["x-paceline-run"] == newer.run_id
    cluster.trainer.kill()
    try:
        wait_for(lambda: client.models.list().model_extra.get("incomplete"))
        raw = client.completions.with_raw_response.create(model="policy", prompt=PROMPT, max_tokens=1)
        assert raw.headers["x-paceline-run"] == newer.run_id
        assert client.models.retrieve("policy").id == "policy"
        listed = {model.id for model in client.models.list()}
        assert {"model", "policy", newer.run_id} <= listed
        with pytest.raises(openai.InternalServerError):
            client.models.retrieve("unknown")
    finally:
        cluster.trainer.start()
    for one in (training.run_id, newer.run_id):
        service.delete_run(one)
    with pytest.raises(openai.NotFoundError):
        greedy(client, "policy")


def test_a_chat_and_its_stream_say_the_same(client, run):
    asked = {"model": run[0], "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.content) == 8
    assert all(len(token.top_logprobs) == 3 for token in whole.choices[0].logprobs.content)


LINE_ENDS = "a\nb\rc\r\nd\x0be\x0cf\x1cg\x1dh\x1ei\x85j\u2028k\u2029l\x00m\x7fn\ufeffo\U0001f6b4 data: [DONE]\n\np"
"""Everything at which some reader of a stream splits lines, and what else one may stumble over."""


def test_every_character_passes_every_streaming_door(cluster, address):
    constraint = {"structured_outputs": {"choice": [LINE_ENDS]}, "max_tokens": 200}
    chat, tool = {**constraint, "messages": MESSAGES, "logprobs": True}, copy.deepcopy(TOOL)
    tool["function"]["parameters"]["properties"] = {"ok": {"const": LINE_ENDS}}
    forced = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    forced |= {"max_tokens": 400, "logit_bias": NO_SPACE}

    def told(path, body, part):
        chunks = events_of(address.removesuffix("/v1"), cluster, path, {"model": "model"} | body)
        assert chunks[-1]["choices"][0]["finish_reason"] in {"stop", "tool_calls"}
        return "".join(part(chunk["choices"][0]) or "" for chunk in chunks)

    def arguments(choice):
        return "".join(call["function"].get("arguments") or "" for call in choice["delta"].get("tool_calls") or ())

    for door in ("", "/weights/model"):
        echo = {**constraint, "prompt": LINE_ENDS, "echo": True}
        assert told(f"{door}/v1/completions", echo, lambda choice: choice["text"]) == 2 * LINE_ENDS
        assert told(f"{door}/v1/chat/completions", chat, lambda choice: choice["delta"].get("content")) == LINE_ENDS
        assert json.loads(told(f"{door}/v1/chat/completions", forced, arguments)) == {"ok": LINE_ENDS}


def test_n_seed_stop_and_logprobs(client):
    asked = {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": 12,
        "seed": 5,
        "n": 3,
        "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    first, again = client.completions.create(**asked), client.completions.create(**asked)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert all(len(choice.logprobs.tokens) == 12 for choice in first.choices)
    free = greedy(client, "model").choices[0].text
    stopped = greedy(client, "model", stop=[free[2]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free[: free.index(free[2])], "stop")


def test_a_prompt_that_ends_within_a_character_is_not_repeated(client):
    prompt = make_tokenizer().encode("Peru costs 5 €")[:-1]
    asked = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    free, with_stop = (client.completions.create(**asked, stop=stop).choices[0] for stop in (None, ["Peru"]))
    assert "Peru" not in free.text
    assert (with_stop.text, with_stop.finish_reason) == (free.text, "length")


def test_several_prompts_as_text_and_as_tokens(client):
    texts = client.completions.create(model="model", prompt=["ab", "cd"], max_tokens=4, temperature=0)
    tokens = client.completions.create(model="model", prompt=[list(b"ab"), list(b"cd")], max_tokens=4, temperature=0)
    assert len(texts.choices) == 2
    assert texts.usage.prompt_tokens in {4, 6}
    assert len(tokens.choices) == 2


def test_answers_are_of_a_schema(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="model", messages=MESSAGES, response_format=schema, max_completion_tokens=60, seed=1
    )
    if answer.choices[0].finish_reason == "stop":
        assert json.loads(answer.choices[0].message.content).keys() == {"ok"}
    chosen = client.completions.create(
        model="model", prompt="x", max_tokens=8, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].text in {"yes", "no"}


NUMBER = {"type": "integer", "minimum": 1, "maximum": 99}
SIDE = {"enum": ["left", "right"]}
OBJECTS = {
    "plain": SCHEMA,
    "reference": {"$ref": "#/$defs/Turn", "$defs": {"Turn": {**SCHEMA, "properties": {"ok": {"$ref": "#/$defs/Side"}}},
                                                    "Side": SIDE}},
    "branches": {"anyOf": [SCHEMA, {**SCHEMA, "properties": {"far": NUMBER}, "required": ["far"]}]},
    "nested": {**SCHEMA, "properties": {"ok": {**SCHEMA, "properties": {"ok": {"type": "array", "items": SIDE,
                                                                              "minItems": 2, "maxItems": 2}}}}},
    "untyped": {"properties": {"ok": SIDE}, "required": ["ok"]},
    "empty": {},
    "none": None,
}  # fmt: skip
"""Schemas of arguments, each of which a random model soon completes."""


def calls_of(client, *, stream, **body):
    """Return each choice's calls: name and arguments."""
    asked = {"model": "model", "messages": MESSAGES, "max_completion_tokens": 160, "logit_bias": NO_SPACE, **body}
    if not stream:
        choices = client.chat.completions.create(**asked).choices
        assert all(choice.finish_reason in {"stop", "tool_calls"} for choice in choices)
        return [
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] for choice in choices
        ]
    found = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            calls = found.setdefault(choice.index, {})
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    return [[calls[index] for index in sorted(calls)] for _, calls in sorted(found.items())]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_call_that_is_demanded_has_arguments_of_its_schema(client, kind, stream):
    schema = OBJECTS[kind]
    named = {"type": "function", "function": {"name": "look"}}
    for choice, strict in ((named, {}), ("required", {"strict": False})):
        function = {"name": "look", **({} if schema is None else {"parameters": schema}), **strict}
        tools = [{"type": "function", "function": function}]
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": choice == named, "n": 2}
        for (name, text), *others in calls_of(client, stream=stream, **body):
            assert (name, others) == ("look", [])
            arguments = json.loads(text)
            assert isinstance(arguments, dict)
            jsonschema.validate(arguments, schema or {"additionalProperties": False})


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_tools_each_call_has_the_arguments_of_its_own(client, stream):
    schemas = {"see": SCHEMA, "go": {**SCHEMA, "properties": {"ok": NUMBER}}, "rest": {}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in schemas]
    found = set()
    for calls in calls_of(
        client, stream=stream, tools=tools, tool_choice="required", n=32, seed=3, parallel_tool_calls=False
    ):
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name] or {"additionalProperties": False})
            found.add(name)
    assert found == {*schemas}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "string"}, "schema of objects"),
        ({"type": ["object", "null"]}, "schema of objects"),
        ({"anyOf": [SCHEMA, {"type": "null"}]}, "schema of objects"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "schema of objects"),
        ({"type": "object", "not": {}}, "has not, which is not enforced"),
        ("x", "must be a JSON Schema"),
    ],
)
def test_parameters_that_no_call_could_be_held_to_are_refused(client, parameters, message):
    tools = [TOOL, {"type": "function", "function": {"name": "other", "parameters": parameters}}]
    body = {"model": "model", "messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refusal.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_that_holds_a_mark_of_the_format_is_no_silent_answer(client, stream):
    parameters = {**SCHEMA, "properties": {"ok": {"const": "a</tool_call>b"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    with pytest.raises(openai.APIError, match="parser cannot read the one that was sampled") as failure:
        calls_of(client, stream=stream, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert (failure.value.code, failure.value.param) == ("unsupported_value", "tool_choice")


def test_a_model_that_shall_not_call_tools_is_shown_none(client):
    def prompt(**body):
        asked = {"model": "model", "messages": MESSAGES, "max_completion_tokens": 1, **body}
        return client.chat.completions.create(**asked, extra_body={"return_token_ids": True}).prompt_token_ids

    assert prompt(tools=[TOOL], tool_choice="none") == prompt()
    assert prompt(tools=[TOOL], tool_choice="required") == prompt(tools=[TOOL]) != prompt()


@pytest.mark.parametrize(
    ("body", "field", "kind"),
    [
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search", openai.BadRequestError),
        ({"prompt": "x", "priority": 3}, "priority", openai.BadRequestError),
        ({"prompt": "x", "n": 100000}, "n", openai.BadRequestError),
        ({"prompt": "x", "temperature": -1}, "temperature", openai.BadRequestError),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", openai.BadRequestError),
        ({"prompt": "x" * 100000}, "prompt", openai.BadRequestError),
        ({"prompt": [10**6]}, "prompt", openai.BadRequestError),
        ({"prompt": "x", "structured_outputs": {"regex": "(" * 10}}, "structured_outputs", openai.BadRequestError),
        ({"prompt": "x", "model": "run-" + "0" * 32}, "run", openai.NotFoundError),
        ({"prompt": "x", "model": "run-" + "0" * 32 + "@"}, "number from 1", openai.BadRequestError),
        ({"prompt": "x", "model": "run-" + "0" * 32 + "@0"}, "number from 1", openai.BadRequestError),
        ({"prompt": "x", "model": "other"}, "model", openai.NotFoundError),
        ({"prompt": "x", "model": "tinker://x"}, "model", openai.BadRequestError),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo", openai.BadRequestError),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(client, body, field, kind):
    with pytest.raises(kind, match=field):
        client.post("/completions", body={"model": "model", "max_tokens": 2, **body}, cast_to=object)


def said(text):
    return [{"role": "user", "content": text}]


CHAT, TEXT = "/chat/completions", "/completions"
UNTRUE = {"type": "function", "function": {"name": "look", "parameters": {"type": "string"}}}


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (CHAT, {"messages": said("x" * 2000)}, "context_length_exceeded", "messages"),
        (CHAT, {"messages": said("x" * 10**6)}, "context_length_exceeded", "messages"),
        (TEXT, {"prompt": "x" * 2000}, "context_length_exceeded", "prompt"),
        (TEXT, {"prompt": [120] * 2000, "stream": True}, "context_length_exceeded", "prompt"),
        (TEXT, {"model": "other", "prompt": "x"}, "model_not_found", "model"),
        (TEXT, {"model": "run-" + "0" * 32, "prompt": "x"}, "model_not_found", "model"),
        (TEXT, {"model": "run-" + "0" * 32 + "@7", "prompt": "x", "stream": True}, "model_not_found", "model"),
        (TEXT, {"model": None, "prompt": "x"}, "missing_required_parameter", "model"),
        (CHAT, {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "unsupported_parameter", "suffix"),
        (TEXT, {"prompt": "x", "colour": "red"}, "unknown_parameter", "colour"),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 1}, "unsupported_value", "echo"),
        (CHAT, {"messages": MESSAGES, "tools": [UNTRUE], "tool_choice": "required"},
         "invalid_function_parameters", "tools[0].function.parameters"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "some"}, "invalid_value", "tool_choice"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        (CHAT, {"messages": said(3)}, "invalid_type", "messages[0].content"),
        (CHAT, {"messages": []}, "empty_array", "messages"),
        (CHAT, {"messages": MESSAGES, "tools": []}, "empty_array", "tools"),
        (CHAT, {"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        (CHAT, {"messages": MESSAGES, "reasoning_effort": "low"}, "unsupported_value", "reasoning_effort"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
         "missing_required_parameter", "response_format.json_schema"),
        (CHAT, {"messages": MESSAGES, "skip_special_tokens": "perhaps"}, "invalid_type", "skip_special_tokens"),
        (TEXT, {}, "missing_required_parameter", "prompt"),
        (TEXT, {"prompt": 3}, "invalid_type", "prompt"),
        (TEXT, {"prompt": []}, "empty_array", "prompt"),
        (TEXT, {"prompt": [[120], []]}, "empty_array", "prompt[1]"),
        (TEXT, {"prompt": ""}, "empty_string", "prompt"),
        (TEXT, {"prompt": [120, 10**6]}, "integer_above_max_value", "prompt[1]"),
        (TEXT, {"prompt": [[120], ["x"]]}, "invalid_type", "prompt[1]"),
        (TEXT, {"prompt": "x", "model": 3}, "invalid_type", "model"),
        (TEXT, {"prompt": "x", "stream": "yes"}, "invalid_type", "stream"),
        (TEXT, {"prompt": "x", "n": 0}, "integer_below_min_value", "n"),
        (TEXT, {"prompt": "x", "n": 1000}, "integer_above_max_value", "n"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "integer_below_min_value", "max_tokens"),
        (TEXT, {"prompt": "x", "temperature": "warm"}, "invalid_type", "temperature"),
        (TEXT, {"prompt": "x", "temperature": 2.5}, "decimal_above_max_value", "temperature"),
        (TEXT, {"prompt": "x", "temperature": 0.001}, "decimal_below_min_value", "temperature"),
        (TEXT, {"prompt": "x", "seed": 2**64}, "integer_above_max_value", "seed"),
        (TEXT, {"prompt": "x", "stop": ["x"] * 65}, "array_above_max_length", "stop"),
        (TEXT, {"prompt": "x", "stop": "x" * 1025}, "string_above_max_length", "stop[0]"),
        (TEXT, {"prompt": "x", "stop": [""]}, "empty_string", "stop[0]"),
        (TEXT, {"prompt": "x", "stop_token_ids": [-1]}, "integer_below_min_value", "stop_token_ids[0]"),
        (TEXT, {"prompt": ["x"] * 257}, "array_above_max_length", "prompt"),
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": "a" * 70000}},
         "string_above_max_length", "structured_outputs"),
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "invalid_value", "structured_outputs"),
        (TEXT, {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
         "unsupported_parameter", "stream_options.include_obfuscation"),
        (TEXT, {"prompt": "x", "stream": True, "stream_options": {"usage": True}},
         "unknown_parameter", "stream_options.usage"),
    ],
)  # fmt: skip
def test_errors_have_the_codes_and_the_fields_of_openai(client, path, body, code, param):
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refusal:
        client.post(path, body={"model": "model", "max_tokens": 2, **body}, cast_to=object)
    error = refusal.value
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert (error.status_code == 404) == (code == "model_not_found")
    assert error.body["reason"] in paceline.errors.CATALOG


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/embeddings", 404, "unknown_url"),
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", "/completions", 405, "method_not_supported"),
        ("DELETE", "/models/model", 405, "method_not_supported"),
    ],
)
def test_paths_and_methods_that_are_not_served_are_told_as_by_openai(cluster, address, method, path, status, code):
    answer = httpx.request(method, f"{address}{path}", headers=headers(cluster), timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert ("allow" in answer.headers) == (status == 405)


def test_an_unknown_key_is_told_as_by_openai(address):
    with pytest.raises(openai.AuthenticationError) as refusal:
        openai.OpenAI(base_url=address, api_key="wrong", max_retries=0).models.list()
    assert (refusal.value.code, refusal.value.body["reason"]) == ("invalid_api_key", "INVALID_API_KEY")


def test_an_error_in_the_middle_of_a_stream_is_told_the_same_way(client):
    # The stream begins hundreds of tokens before the error, which would otherwise be its whole answer now and then.
    body = {"structured_outputs": {"regex": r"a{500}[^\x00-\U0010ffff]"}}
    stream = client.completions.create(model="model", prompt="x", max_tokens=600, stream=True, extra_body=body)
    with pytest.raises(openai.APIError, match="the constraint allows no token") as failure:
        list(stream)
    assert (failure.value.type, failure.value.body["reason"]) == ("invalid_request_error", "NON_FINITE")


def test_prompt_and_answer_fill_the_context_that_the_model_has_and_no_more(client):
    ask = {"model": "model", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    assert client.completions.create(prompt=[120] * 1000, **ask).usage.total_tokens == 1024
    with pytest.raises(openai.BadRequestError, match="1024") as refusal:
        client.completions.create(prompt=[120] * 1100, **ask)
    assert "1025" not in str(refusal.value)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": "hi"}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "text",
        ),
        ({"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"messages": MESSAGES, "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, r"messages\[1\].content"),
        ({"messages": [{**MESSAGES[0], "nmae": "bob"}]}, r"messages\[0\].nmae"),
        ({"messages": [{**MESSAGES[0], "tool_calls": [CALL]}]}, r"messages\[0\].tool_calls"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            r"messages\[0\].tool_calls\[0\].function.arguments",
        ),
        ({"messages": MESSAGES, "tools": [{**TOOL, "nmae": "look"}]}, r"tools\[0\].nmae"),
        ({}, "messages"),
    ],
)
def test_what_a_chat_may_not_have_is_refused_by_its_name(client, body, field):
    with pytest.raises(openai.APIStatusError, match=field) as refusal:
        client.post("/chat/completions", body={"model": "model", **body}, cast_to=object)
    assert refusal.value.status_code == 400


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("arguments", [{"ok": True}, '{"ok": true}'])
def test_an_answer_is_sampled_after_the_prompt_that_it_is_trained_after(cluster, client, name, arguments):
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "twice"}]},
        {"role": "assistant", "content": None, name: "Hm.", "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "17", "tool_call_id": "c1"},
    ]
    body = {"model": "model", "messages": messages, "max_tokens": 1, "return_token_ids": True}
    sampled = client.post("/chat/completions", body=body, cast_to=httpx.Response).json()["prompt_token_ids"]
    messages[2]["weight"] = 0
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        ((datum,),) = service.render_conversations([[*messages, {"role": "assistant", "content": "17"}]])
    trained_from = int(datum.loss_fn_inputs["mask"].argmax()) + 1
    assert datum.model_input[:trained_from].tolist() == sampled
    text = make_tokenizer().decode(sampled)
    assert "<think>Hm.</think>" in text
    assert '{"name": "look", "arguments": {"ok": true}}' in text


def test_anothers_runs_and_checkpoints_look_absent(cluster, address, run):
    key = add_key(cluster.state / "keys.json", "other", "other")
    stranger = openai.OpenAI(base_url=address, api_key=key, max_retries=0)
    assert [model.id for model in stranger.models.list()] == ["model", "gpt-nothing"]
    for name in (run[0], f"{run[0]}@1", run[1]):
        with pytest.raises(openai.NotFoundError):
            greedy(stranger, name)


def test_a_stream_that_is_left_ends_in_the_sampler(cluster, client, service):
    stream = client.completions.create(
        model="model", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    def is_free():
        used = {quota.name: quota.used for quota in service.whoami().quotas}
        return used["completions"] == 0

    wait_for(is_free)


def test_an_answer_whose_caller_leaves_ends_in_the_sampler(cluster, address, service):
    body = {"model": "model", "prompt": "x", "max_tokens": 400, "n": 8, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{address}/completions", json=body, headers={"Authorization": f"Bearer {cluster.api_key}"}, timeout=0.3
        )
    wait_for(lambda: {quota.name: quota.used for quota in service.whoami().quotas}["completions"] == 0)
    lines = [line for line in cluster.gateway.log.read_text().splitlines() if "/v1/completions" in line]
    assert "status=200" not in lines[-1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": 1}',
        b'{"model": "model"}',
        b"[" * 10000,
        b'{"model": "model", "prompt": "x", "stop": ["\\ud800"]}',
    ],
)
def test_a_body_that_is_none_is_refused_in_json(cluster, address, content):
    answer = httpx.post(
        f"{address}/completions", content=content, headers={"Authorization": f"Bearer {cluster.api_key}"}, timeout=60
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_constraint_that_allows_no_token_is_named_as_the_cause(client):
    nothing = {"structured_outputs": {"regex": r"[^\x00-\U0010ffff]"}}
    with pytest.raises(openai.APIStatusError, match="the constraint allows no token"):
        client.completions.create(model="model", prompt="x", max_tokens=1, extra_body=nothing)


def test_no_prompt_is_in_the_logs(cluster, client):
    secret = hashlib.sha256(b"secret").hexdigest()
    client.completions.create(model="model", prompt=secret, max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="model", prompt=secret, max_tokens=1, temperature=-5)
    for service in (cluster.sampler, cluster.gateway):
        assert secret not in service.log.read_text(errors="replace")

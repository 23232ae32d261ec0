"""Conversations as data: tokens as they would be sampled, and the loss on responses only."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from operator import itemgetter

import pytest
from support.models.tiny_models import EOS_ID, make_tiny_llama, make_tokenizer
from transformers import AutoTokenizer

from paceline import errors
from trainer_service.text import ConversationRenderer, read_tokenizer_files

TOKENIZER = make_tokenizer()
USER, OTHER = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And?"}

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TURNS = (
    "{%% for m in messages %%}<|im_start|>%s\n{{ m.content }}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture
def model(tmp_path):
    return make_tiny_llama(tmp_path)


def write_template(model, template):
    (model / "chat_template.jinja").write_text(template)


async def render(model, *conversations, longest=512, **more):
    bodies = [json.dumps({"messages": messages, **more}).encode() for messages in conversations]
    return await ConversationRenderer(str(model)).render("tenant", bodies, longest)


def said(datum):
    """Return the texts that are trained, one for each response."""
    targets, weights = datum.loss_fn_inputs["target_tokens"].tolist(), datum.loss_fn_inputs["weights"].tolist()
    groups = groupby(zip(targets, weights, strict=True), key=itemgetter(1))
    return [TOKENIZER.decode([token for token, _ in group]) for weight, group in groups if weight]


async def test_each_response_is_trained_up_to_the_token_that_ends_it(model):
    ((datum,),) = await render(model, [USER, says("Ho"), OTHER, says("No", weight=0), OTHER, says("Yes")])
    assert said(datum) == ["Ho<|im_end|>", "Yes<|im_end|>"]
    assert len(datum.model_input) == len(datum.loss_fn_inputs["target_tokens"])


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
async def test_the_ends_are_those_of_the_generation_config_too(model, file):
    """The samplers take config.json's where there is no generation_config.json."""
    write_template(
        model,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|bos|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    config = json.loads((model / file).read_text())
    (model / "generation_config.json").unlink()
    (model / file).write_text(json.dumps({**config, "eos_token_id": [EOS_ID, 257]}))
    ((datum,),) = await render(model, [USER, says("Ho")])
    assert said(datum) == ["Ho<|bos|>"]


async def test_tools_are_written_or_refused(model):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(errors.Unsupported, match=r"tools\[0\].function.name: is ignored"):
        await render(model, [USER, says("Ho")], tools=tools)
    write_template(
        model,
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
        "<|im_end|>{% endfor %}",
    )
    ((datum,),) = await render(model, [USER, says("Ho")], tools=tools)
    assert TOKENIZER.decode(datum.model_input).startswith("fHi")
    tools[0]["function"]["description"] = "Does it."
    with pytest.raises(errors.Unsupported, match=r"tools\[0\].function.description: is ignored"):
        await render(model, [USER, says("Ho")], tools=tools)
    write_template(
        model,
        "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}"
        "{% for name in tool.function.parameters.properties %}{{ name }}{% endfor %}{% endfor %}"
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    )
    tools[0]["function"]["parameters"] = {"type": "object", "properties": {"a": {"type": "string"}}}
    ((datum,),) = await render(model, [USER, says("Ho")], tools=tools)
    assert TOKENIZER.decode(datum.model_input).startswith("fDoes it.aHi")
    tools[0]["function"]["parameters"]["properties"]["a"]["description"] = "A city."
    with pytest.raises(
        errors.Unsupported, match=r"tools\[0\].function.parameters.properties.a.description: is ignored"
    ):
        await render(model, [USER, says("Ho")], tools=tools)


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}{{ effort or 'low' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


async def test_variables_of_the_template_are_set_as_when_it_is_served(model):
    write_template(model, THINKS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for kwargs in ({"enable_thinking": False}, {"enable_thinking": True}, {"effort": "low"}, {"effort": "high"}, {}):
        ((datum,),) = await render(model, [USER, says("Ho")], chat_template_kwargs=kwargs)
        prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False, **kwargs)
        assert said(datum) == [f"Ho{kwargs.get('effort', 'low')}<|im_end|>"]
        assert TOKENIZER.decode(datum.model_input.tolist()).startswith(prompt)


@pytest.mark.parametrize("name", ["thinking", "tools", "messages", "conversation", "padding", "tokenize"])
async def test_a_variable_that_changes_nothing_is_refused_by_its_name(model, name):
    write_template(model, THINKS)
    with pytest.raises(errors.UnknownField) as refused:
        await render(model, [USER, says("Ho")], chat_template_kwargs={"enable_thinking": False, name: True})
    assert refused.value.field == f"conversations[0].chat_template_kwargs.{name}"


async def test_a_template_that_forgets_makes_a_sequence_of_each_response(model):
    write_template(
        model,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == 'user' else '...' }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    (data,) = await render(model, [USER, says("Long thoughts"), OTHER, says("Yes")])
    assert [said(datum) for datum in data] == [["Long thoughts<|im_end|>"], ["Yes<|im_end|>"]]
    assert "thoughts" not in TOKENIZER.decode(data[1].model_input)


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ([USER], "messages", "no message of role assistant"),
        ([USER, says("a", weight=0)], "messages", "no message of role assistant"),
        ([USER, says("a", weight=2)], "messages[1].weight", "0 or 1"),
        ([USER, says(None)], "messages[1].content", "is empty"),
        ([USER, says(" \n")], "messages[1].content", "is empty"),
        ([USER, says(7)], "messages[1].content", "text"),
        ([{"role": "user", "content": None}, says("a")], "messages[0].content", "give the message's text"),
        ([USER, says("a"), OTHER], "messages[2]", "comes after the last response"),
        (
            [USER, says("a", tool_calls=[CALL | {"function": {"name": "f", "arguments": "[1]"}}])],
            "messages[1].tool_calls[0].function.arguments",
            "an object",
        ),
        (
            [USER, says("a", tool_calls=[CALL | {"function": {"name": "f", "arguments": '{"a": '}}])],
            "messages[1].tool_calls[0].function.arguments",
            "not JSON",
        ),
        (
            [USER, says("a", tool_calls=[CALL | {"function": {"name": "f", "arguments": '{"a": {"b": 1, "b": 2}}'}}])],
            "messages[1].tool_calls[0].function.arguments",
            "'b' twice",
        ),
        (
            [USER, says("a", tool_calls=[CALL | {"function": {"name": "f", "arguments": '{"a": 1e999}'}}])],
            "messages[1].tool_calls[0].function.arguments",
            "not finite",
        ),
        ([USER, says("a", tool_calls=[CALL | {"type": "custom"}])], "messages[1].tool_calls[0]", "of type function"),
        ([USER, says("a", reasoning="b", thinking="c")], "messages[1].thinking", "differs from reasoning"),
        ([USER | {"reasoning": "b"}, says("a")], "messages[0].reasoning", "role assistant only"),
        ([USER | {"tool_call_id": "b"}, says("a")], "messages[0].tool_call_id", "role tool only"),
        ([USER, says("a", function_call={"name": "f"})], "messages[1].function_call", "not known"),
        (
            [{"role": "system", "content": "x-anthropic-billing-header: 1"}, USER, says("a")],
            "messages[0].content",
            "dropped",
        ),
        ([USER, says("a<|im_end|>\n<|im_start|>user\nb<|im_end|>c")], "messages[1]", "ends a response"),
        ([USER, says("a" * 600)], "messages", "the context is 512"),
        ([USER] * 600 + [says("a")], "messages", "the context is 512"),
        (["a", says("a")], "messages[0]", "object"),
        ([says("a"), USER], "messages[0]", "needs a message before it"),
        ([USER, says("")], "messages[1].content", "is empty"),
        ([{**USER, "wieght": 1}, says("a")], "messages[0].wieght", "not known"),
        ([{"from": "human", "value": "a"}, says("a")], "messages[0].", "not known"),
    ],
)
async def test_what_cannot_be_trained_is_refused_by_its_place(model, messages, field, words):
    with pytest.raises(errors.InvalidArgument, match=words) as caught:
        await render(model, [USER, says("Ho")], messages)
    assert caught.value.field.startswith(f"conversations[1].{field}")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{{ messages[7].content }}", "{{"])
async def test_a_template_that_fails_is_a_refusal(model, template):
    write_template(model, template)
    with pytest.raises(errors.InvalidArgument, match="chat template"):
        await render(model, [USER, says("Ho")])


async def test_a_response_that_the_template_leaves_out_is_refused(model):
    write_template(model, "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(errors.Unsupported, match=r"messages\[1\].content: is ignored"):
        await render(model, [USER, says("Ho")])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([USER, says("Ho", reasoning="Hm")], "messages[1].reasoning"),
        ([USER, says("Ho", reasoning="Hm", weight=0), OTHER, says("Yes")], "messages[1].reasoning"),
        ([USER, says(None, tool_calls=[CALL])], "messages[1].tool_calls[0].function.name"),
        ([USER | {"name": "bob"}, says("Ho")], "messages[0].name"),
        ([USER, says("Ho"), {"role": "tool", "content": "17", "tool_call_id": "c1"}, says("No")],
         "messages[2].tool_call_id"),
        ([USER, says("Ho"), {"role": "tool", "content": "17", "name": "f"}, says("No")], "messages[2].name"),
    ],
)  # fmt: skip
async def test_a_field_that_the_template_leaves_out_is_refused_by_its_name(model, messages, field):
    with pytest.raises(errors.Unsupported) as caught:
        await render(model, messages)
    assert caught.value.field == f"conversations[0].{field}"


async def test_a_users_name_is_not_taken_for_written_because_a_function_has_it(model):
    write_template(
        model,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}",
    )
    with pytest.raises(errors.Unsupported, match=r"messages\[0\].name: is ignored"):
        await render(model, [USER | {"name": CALL["function"]["name"]}, says("", tool_calls=[CALL])])


async def test_a_role_that_is_written_as_another_is_refused(model):
    write_template(model, TURNS % "{{ 'user' if m.role == 'user' else 'assistant' }}")
    with pytest.raises(errors.Unsupported, match=r"messages\[0\].role: is system, .* writes assistant"):
        await render(model, [{"role": "system", "content": "Be brief."}, USER, says("Ho")])


async def test_results_stand_in_the_order_of_calls_where_no_id_is_written(model):
    write_template(
        model,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    calls = [CALL, CALL | {"id": "c2", "function": {"name": "g", "arguments": {}}}]
    asks = [USER, says("", tool_calls=calls)]
    results = [
        {"role": "tool", "content": text, "tool_call_id": text, "name": of} for text, of in (("c1", "f"), ("c2", "g"))
    ]
    ((datum,),) = await render(model, [*asks, *results, says("Ho")])
    assert said(datum) == [
        '{"name": "f", "arguments": {"a": 1}}{"name": "g", "arguments": {}}<|im_end|>',
        "Ho<|im_end|>",
    ]
    with pytest.raises(errors.Unsupported, match=r"messages\[2\].tool_call_id: .* in the order of their calls"):
        await render(model, [*asks, *reversed(results), says("Ho")])
    with pytest.raises(errors.Unsupported, match=r"messages\[2\].name: .* not the name in the call"):
        await render(model, [*asks, results[0] | {"name": "h"}, results[1], says("Ho")])


@pytest.mark.parametrize("end", ["", "\n", "<|bos|>\n"])
async def test_a_template_without_an_end_gets_the_end_of_sequence(model, end):
    """Nothing else ends sampling. Only what the response itself has is trained before it."""
    write_template(
        model,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )
    (data,) = await render(model, [USER, says("Ho\n"), OTHER, says("Yes")])
    shown = end.rstrip("\n")
    assert [said(datum) for datum in data] == [[f"Ho\n{shown}<|im_end|>"], [f"Yes{shown}<|im_end|>"]]


async def test_a_token_that_ends_sampling_inside_of_a_response_is_refused(model):
    write_template(
        model,
        "{% for m in messages %}{{ m.role }}: {{ m.reasoning or '' }}<|im_end|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )
    with pytest.raises(errors.InvalidArgument, match=r"messages\[1\]: .* a token inside"):
        await render(model, [USER, says("Ho", reasoning="Hm")])


async def test_what_follows_the_end_is_not_in_the_data(model):
    ((datum,),) = await render(model, [USER, says("Ho")])
    assert datum.loss_fn_inputs["target_tokens"][-1] == EOS_ID
    assert datum.loss_fn_inputs["mask"][-1] == 1


@pytest.mark.parametrize(
    "body", [b"\xff", '{"messages": [{"role": "\\ud800"}]}'.encode("utf-16"), b"\xed\xa0\x80", b"[]"]
)
async def test_bodies_that_are_no_json_objects_are_refused(model, body):
    with pytest.raises(errors.UnreadableMessage):
        await ConversationRenderer(str(model)).render("tenant", [body], 512)


async def test_tenants_take_turns(model):
    renderer = ConversationRenderer(str(model))
    long = json.dumps({"messages": [USER, says("a" * 400)]}).encode()
    order = []

    async def ask(tenant, count):
        done = 0
        while done < count:
            done += len(await renderer.render(tenant, [long] * (count - done), 512))
        order.append(tenant)

    await asyncio.gather(*(ask("many", 600) for _ in range(3)), ask("few", 1))
    assert order[0] == "few"


def test_clients_get_the_chat_templates_that_have_names(model, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}
    tokenizer.save_pretrained(model)
    assert (model / "additional_chat_templates" / "tool_use.jinja").is_file()
    received = tmp_path / "received"
    received.mkdir()
    for name, content in read_tokenizer_files(str(model)).items():
        (received / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(received)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert theirs.apply_chat_template([USER], tokenize=False) == "plain"
    assert theirs.apply_chat_template([USER], tools=tools, tokenize=False) == "with f"


def test_the_tokenizers_files_come_through_the_links_of_the_hubs_cache(model, tmp_path):
    expected = read_tokenizer_files(str(model))
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "commit", tmp_path / "hub" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(expected):
        (model / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert read_tokenizer_files(str(snapshot)) == expected


def test_a_tokenizers_file_that_leads_out_of_the_model_is_sent_to_nobody(model, tmp_path_factory):
    secret = tmp_path_factory.mktemp("secrets") / "credential"
    secret.write_text("secret")
    (model / "added_tokens.json").symlink_to(secret)
    with pytest.raises(errors.ModelNotLoadable, match=r"added_tokens\.json is a link to a file outside"):
        read_tokenizer_files(str(model))

"""Conversations over the chat templates of many families: trained after the prompt that is served, up to what ends it.

vLLM's own renderer, given OpenAI's messages as they come, is the reference for texts. The variants of the templates
that mark what the model generates are the reference for masks.
"""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass

import pytest
from support.models.chat_templates import FAMILIES, Family
from support.models.tiny_models import make_tiny_llama

from paceline import errors
from paceline.chat.messages import read_messages
from trainer_service.text import ConversationRenderer

CONTEXT = 1 << 15
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {"type": "object", "properties": {of: {"type": "string"}}, "required": [of]},
        },
    }
    for name, of in (("weather", "city"), ("time", "zone"))
]
WEATHER = {
    "id": "weather01",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
}
TIME = {"id": "thetime01", "type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
THOUGHT = "<think>\nHm.\n</think>\n\nHo"


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def result(call, content="17"):
    return {"role": "tool", "content": content, "tool_call_id": call["id"]}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@dataclass(frozen=True)
class Case:
    messages: list
    calls: int = 0
    has_reasoning: bool = False

    @property
    def tools(self):
        return TOOLS if self.calls else None


CASES = {
    "plain": Case([USER, says("Ho")]),
    "system": Case([SYSTEM, USER, says("Ho")]),
    "developer": Case([{"role": "developer", "content": "Be brief."}, USER, says("Ho")]),
    "turns": Case([USER, says("Ho"), USER, says("No", weight=0), USER, says("Yes")]),
    "spaces": Case([USER, says("  Ho \n")]),
    "parts": Case([{**USER, "content": parts("Hi", "", "there")}, says(parts("Ho"))]),
    "thought": Case([USER, says(THOUGHT), USER, says(THOUGHT)]),
    **{
        name: Case([USER, says("Ho", **{name: "Hm."}), USER, says("Yes", **{name: "So."})], has_reasoning=True)
        for name in ("reasoning", "reasoning_content", "thinking")
    },
    "call": Case([USER, says(None, tool_calls=[WEATHER])], calls=1),
    "call of an object": Case([USER, says("", tool_calls=[TIME])], calls=1),
    "result": Case([USER, says(None, tool_calls=[WEATHER]), result(WEATHER), says("17")], calls=1),
    "two calls": Case([USER, says("", tool_calls=[WEATHER, TIME])], calls=2),
    "two results": Case(
        [SYSTEM, USER, says(None, tool_calls=[WEATHER, TIME]), result(WEATHER), result(TIME, "9"), says("So."), USER,
         says("Yes")],
        calls=2,
    ),
    "reasoned call": Case(
        [USER, says(None, reasoning="Hm.", tool_calls=[WEATHER]), result(WEATHER), says("17", reasoning="So.")],
        calls=1,
        has_reasoning=True,
    ),
}  # fmt: skip

OPENS_A_THOUGHT = {"deepseek_r1_distill", "deepseekv3"}
"""Their prompt opens a thought, and their template writes responses without it."""
EMPTY_THOUGHT = {"nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_ultra"}
"""They write an empty thought without the line that their prompt has in it."""
OTHER_NAME = {"gptoss", "lfm2_2_5"}
"""Their templates read reasoning by the name `thinking`, by which vLLM's renderer does not give it."""
UNMARKED = {"idefics3", "llava_next", "smolvlm"}
"""The marks of these templates do not cover content that is text."""
REFUSED = {
    "gemma": {"system", "developer"},
    # Its template drops the reasoning of a call once the result is answered.
    "gptoss": {"reasoned call"},
    # Their prompts end a thought, or begin one that is not parsed from content.
    "qwen3_5_nothink": {"thought"},
    "qwen3_8": {"thought"},
}
"""What a family refuses besides reasoning, calls and responses without a thought that it has no place for."""


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    from vllm.config import ModelConfig, VllmConfig

    directory = make_tiny_llama(tmp_path_factory.mktemp("model"))
    return VllmConfig(model_config=ModelConfig(model=str(directory), tokenizer_mode="hf"))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def directory(family, tmp_path_factory):
    directory = tmp_path_factory.mktemp(family.name)
    family.save(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(family, directory):
    tokenizer = family.tokenizer()
    tokenizer.name_or_path = str(directory)
    return tokenizer


@pytest.fixture(scope="module")
def renderer(directory):
    return ConversationRenderer(str(directory))


@pytest.fixture(scope="module")
def served(vllm_config, tokenizer):
    """Return the text that vLLM renders for a request of its OpenAI layer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.hf import HfRenderer

    renderer = HfRenderer(vllm_config, tokenizer)

    def render(messages, tools, *, is_whole=False):
        request = ChatCompletionRequest.model_validate(
            {
                "messages": as_sent(messages),
                **({"tools": tools} if tools else {}),
                "add_generation_prompt": not is_whole,
            }
        )
        given = [tool.model_dump() for tool in request.tools] if request.tools else None
        params = request.build_chat_params(None, "auto").with_defaults({"tools": given, "tokenize": False})
        _, prompt = renderer.render_messages(request.messages, params)
        return prompt["prompt"]

    return render


def as_sent(messages):
    """Return messages as a client of OpenAI's API sends them, which has no weights, and arguments as text only."""
    sent = copy.deepcopy(messages)
    for message in sent:
        message.pop("weight", None)
        if message["content"] == "" and "tool_calls" in message:
            message["content"] = None  # vLLM makes an empty part of an empty text
        if "thinking" in message:
            message["reasoning"] = message.pop("thinking")
        for call in message.get("tool_calls") or ():
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def render(renderer, case):
    body = {"messages": case.messages, **({"tools": case.tools} if case.tools else {})}
    (data,) = asyncio.run(renderer.render("tenant", [json.dumps(body).encode()], CONTEXT))
    return data


def turns(data):
    """Return the prompt and the response, in tokens, of each trained turn."""
    found = []
    for datum in data:
        tokens = [*datum.model_input.tolist(), int(datum.loss_fn_inputs["target_tokens"][-1])]
        trained = [False, *datum.loss_fn_inputs["mask"].astype(bool).tolist()]
        assert datum.loss_fn_inputs["weights"].tolist() == datum.loss_fn_inputs["mask"].tolist()
        starts = [index for index in range(1, len(tokens)) if trained[index] and not trained[index - 1]]
        for start in starts:
            end = next((index for index in range(start, len(tokens)) if not trained[index]), len(tokens))
            found.append((tokens[:start], tokens[start:end]))
    return found


def is_refused(family: Family, name: str) -> bool:
    case = CASES[name]
    lacks_thought = family.name in OPENS_A_THOUGHT and not (case.has_reasoning or name == "thought")
    return (
        lacks_thought
        or case.calls > family.calls
        or (case.has_reasoning and not family.has_reasoning)
        or name in REFUSED.get(family.name, ())
    )


def test_a_response_is_trained_after_the_prompt_that_is_served_up_to_an_end(family, renderer, tokenizer, served):
    ends = set(tokenizer.convert_tokens_to_ids(list(family.ends)))
    for name, case in CASES.items():
        if is_refused(family, name):
            with pytest.raises(errors.PacelineError) as caught:
                render(renderer, case)
            assert caught.value.field.startswith(("conversations[0].messages", "conversations[0].tools")), name
            continue
        trained = [
            index
            for index, message in enumerate(case.messages)
            if message["role"] == "assistant" and message.get("weight", 1)
        ]
        for last, (prompt, response) in zip(trained, turns(render(renderer, case)), strict=True):
            assert response[-1] in ends, name
            assert ends.isdisjoint(response[:-1]), name
            assert tokenizer.decode(prompt) == served(case.messages[:last], case.tools), name
            if family.name in OPENS_A_THOUGHT | EMPTY_THOUGHT or (family.name in OTHER_NAME and case.has_reasoning):
                continue
            whole = served(case.messages[: last + 1], case.tools, is_whole=True)
            assert whole.startswith(tokenizer.decode(prompt + response[:-1])), name


def test_what_is_trained_is_what_the_marked_template_has_the_model_generate(family, renderer, tokenizer):
    if family.name in UNMARKED or not family.has_variant("_training"):
        return
    marked = family.tokenizer("_training")
    for name, case in CASES.items():
        if is_refused(family, name) or name in {"parts", "developer"}:
            continue
        if family.name == "deepseekv3" or (family.name == "deepseek_r1_distill" and name != "thought"):
            continue  # their marked templates write reasoning only as a part of content, or not at all
        *_, (prompt, response) = turns(render(renderer, case))
        rendered = marked.apply_chat_template(
            as_hugging_face_has_them(case.messages),
            tools=case.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        generated = last_generated(marked, rendered["input_ids"], rendered["assistant_masks"])
        before, ours, after = generated.partition(tokenizer.decode(response))
        assert ours, (name, generated)
        # The marks of some templates begin in the prompt, and end after what ends sampling.
        assert tokenizer.decode(prompt).rstrip().endswith(before.rstrip()), name
        assert not after.replace(tokenizer.eos_token, "").strip(), name


def last_generated(tokenizer, tokens, mask):
    """Return the text of the last run of generated tokens."""
    last = max(index for index, is_generated in enumerate(mask) if is_generated)
    first = max((index for index in range(last) if not mask[index]), default=-1) + 1
    return tokenizer.decode(tokens[first : last + 1])


def as_hugging_face_has_them(messages):
    """Return messages in the form that templates are written for."""
    return [
        {
            **message,
            "content": message["content"] or "",
            **dict.fromkeys(
                ("reasoning_content", "thinking") if "reasoning" in message else (), message.get("reasoning")
            ),
        }
        for message in read_messages(as_sent(messages))
    ]


@pytest.mark.parametrize(
    ("family", "messages", "response"),
    [
        ("phi3", [USER, says("Ho")], "Ho<|end|>"),
        ("qwen3", [USER, says("Ho", reasoning="Hm.")], "<think>\nHm.\n</think>\n\nHo<|im_end|>"),
        ("qwen3", [USER, says("Ho", thinking="Hm.")], "<think>\nHm.\n</think>\n\nHo<|im_end|>"),
        ("deepseek_r1_distill", [USER, says("Ho", reasoning="Hm.")], "Hm.\n</think>\n\nHo<｜end▁of▁sentence｜>"),
        ("deepseek_r1_distill", [USER, says(THOUGHT)], "Hm.\n</think>\n\nHo<｜end▁of▁sentence｜>"),
        ("nemotron_3_nano", [USER, says("Ho")], "</think>Ho<|im_end|>"),
        ("glm4moe", [USER, says("Ho")], "\n<think></think>\nHo<|user|>"),
        (
            "glm4moe",
            [USER, says(None, tool_calls=[TIME])],
            "\n<think></think>\n<tool_call>time\n<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n</tool_call>"
            "<|observation|>",
        ),
        ("gptoss", [USER, says(None, tool_calls=[WEATHER])],
         ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome", "days": 2}<|call|>'),
        ("llama3_1", [USER, says(None, tool_calls=[WEATHER])],
         '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}<|eot_id|>'),
        ("qwen2_5", [USER, says(None, tool_calls=[WEATHER])],
         '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call><|im_end|>'),
    ],
)  # fmt: skip
def test_a_response_ends_as_its_family_ends_one(family, messages, response, tmp_path):
    (chosen,) = (each for each in FAMILIES if each.name == family)
    tokenizer = chosen.save(tmp_path)
    case = Case(messages, calls=int("tool_calls" in messages[-1]))
    ((_, found),) = turns(render(ConversationRenderer(str(tmp_path)), case))
    assert tokenizer.decode(found) == response

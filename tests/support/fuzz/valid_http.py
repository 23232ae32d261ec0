"""A valid, tiny body for each HTTP route that takes one and is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.tinker.v1 import tinker_pb2 as tinker
from support.fuzz.valid_requests import TOKENS, Owned

FORWARD_BACKWARD = "/api/v1/forward_backward"
"""The route whose body is a message of protobuf."""
BATCHES = (FORWARD_BACKWARD, "/v1/train/forward_backward")
"""Routes that make gradients."""


@dataclass
class HttpOwned:
    """A tenant's session of Tinker's API, what belongs to it, and a session of MetaClaw's."""

    session: str
    model: str
    sampler: str
    metaclaw: str
    metaclaw_state: str
    run: Owned
    """The model's run: its commands have the same numbers."""

    @property
    def names(self) -> list[str]:
        return [self.session, self.model, self.run.state, self.sampler, self.metaclaw, "model"]

    def part(self, name: str) -> str:
        """Return what a part of a route's path is for these things; empty for another part."""
        parts = {"session_id": self.session, "model_id": self.model, "sampler_id": self.sampler, "folder": "weights"}
        return {**parts, "name": "a", "weights": self.model}.get(name, "")


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_SAMPLED: dict[str, tuple[Any, ...]] = {
    "n": (0, 1, 4, 64, 2**31),
    "stop": ("a", ["a"] * 5, ["a"] * 5000, "a" * 100_000, [""], "\u2028"),
    "temperature": (0, 0.001, 1, -1, 1e308),
    "top_p": (0, 1e-9, 1, 2),
    "logit_bias": ({"1": 1}, {"x": 1}, {"1": 1e9}, {str(number): 1 for number in range(2000)}),
    "seed": (0, -1, 2**63),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {}, []),
    "user": ("a", "a" * 5000),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    **_SAMPLED,
    "logprobs": (True, False, 1),
    "top_logprobs": (0, 5, 20, 1000, -1),
    "tools": ([_TOOL], [_TOOL] * 300, [], [{}]),
    "tool_choice": ("auto", "none", "required", "x", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": (True, False, "x"),
    "reasoning_effort": ("low", "high", "x", 1),
    "include_reasoning": (True, False),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        {"type": "json_schema"},
    ),
    "chat_template_kwargs": ({"enable_thinking": True}, {"messages": []}, []),
}
_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_SAMPLED,
    "logprobs": (0, 5, 1000, -1, True),
    "echo": (True, False),
    "prompt": (["a"] * 300, [[1, 2]] * 300, [], [[]], "a\u2028b\u0085c", [2**31], [-1]),
    "best_of": (1, 64),
    "suffix": ("a",),
}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "b", "reasoning": "c"},
    {"role": "assistant", "content": "b", "reasoning_content": "c"},
    {"role": "assistant", "content": "b", "thinking": "c"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
    {"role": "assistant", "content": "b", "weight": 0},
    {"role": "assistant", "content": "b\u2028\u0085"},
    {"role": "tool", "tool_call_id": "1", "content": "c"},
    {"role": "developer", "content": "c", "name": "d"},
)
"""Messages with each field that a conversation may have, and some that it may not."""
_METADATA = ({"a": "b"}, {"a": "b" * 2000}, {str(number): "" for number in range(100)}, {"a": {"b": ["c"] * 500}})
_SAVED: dict[str, tuple[Any, ...]] = {"user_metadata": _METADATA, "ttl_seconds": (1, 60, 3600, 0, -1, 2**63)}
MORE: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": _COMPLETION,
    "/weights/{weights}/v1/completions": _COMPLETION,
    "/generate": _COMPLETION,
    "/weights/{weights}/generate": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/weights/{weights}/v1/chat/completions": _CHAT,
    "/api/v1/create_session": {
        "user_metadata": _METADATA,
        "tags": (["a"] * 100, ["a" * 5000]),
        "display_name": ("a", "a" * 5000),
    },
    "/api/v1/create_model": {"user_metadata": _METADATA},
    "/api/v1/save_weights": _SAVED,
    "/api/v1/save_weights_external": _SAVED,
    "/api/v1/save_weights_for_sampler": _SAVED,
}
"""Fields that may be added to a valid body, with values of which some are refused."""


def valid_bodies(owned: HttpOwned, number: int, seq_id: int) -> dict[str, dict[str, Any] | bytes]:
    """Return a valid body for each route that is posted to and served.

    `number` distinguishes what the requests create from what others created.
    """
    command = {"model_id": owned.model, "seq_id": seq_id}
    prompt = {"prompt": TOKENS.tolist(), "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    tokens = TOKENS.tolist()
    datum = {"model_input_tokens": tokens, "target_tokens": tokens, "logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
    return {
        FORWARD_BACKWARD: _forward_backward(owned, seq_id),
        "/api/v1/client/config": {"sdk_version": "1"},
        "/api/v1/client/dynamic_config": {"sdk_version": "1"},
        "/api/v1/create_session": {"tags": ["a"]},
        "/api/v1/session_heartbeat": {"session_id": owned.session},
        "/api/v1/sessions/{session_id}/finish": {},
        "/api/v1/telemetry": {"events": [], "session_id": owned.session},
        "/api/v1/create_model": {
            "session_id": owned.session,
            "model_seq_id": number % 8,
            "base_model": "model",
            "lora_config": {"rank": 2},
        },
        "/api/v1/get_info": {"model_id": owned.model},
        "/api/v1/optim_step": {**command, "adam_params": {"learning_rate": 1e-4}},
        "/api/v1/save_weights": {**command, "path": "b", "overwrite": True},
        "/api/v1/save_weights_external": {**command, "path": "b", "overwrite": True},
        "/api/v1/save_weights_for_sampler": {**command, "sampling_session_seq_id": number},
        "/api/v1/unload_model": {"model_id": owned.model},
        "/api/v1/load_weights": {**command, "path": owned.run.state},
        "/api/v1/create_sampling_session": {
            "session_id": owned.session,
            "sampling_session_seq_id": number,
            "base_model": "model",
        },
        "/api/v1/join_sampling_session": {"sampling_session_id": owned.sampler},
        "/api/v1/asample": {
            "sampling_session_id": owned.sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {"max_tokens": 2},
        },
        "/api/v1/retrieve_futures": {"target": {"sampling_session_id": owned.sampler}, "timeout": 0},
        "/api/v1/cancel_future": {"request_id": f"{owned.sampler}:{number}"},
        "/api/v1/weights_info": {"tinker_path": owned.run.state},
        "/v1/completions": {"model": owned.model, **prompt},
        "/v1/chat/completions": {"model": "model", **chat},
        "/weights/{weights}/v1/completions": prompt,
        "/weights/{weights}/v1/chat/completions": chat,
        "/generate": {"model": "model", **prompt},
        "/weights/{weights}/generate": prompt,
        "/v1/lora/create": {"rank": 2},
        "/v1/weights/save": {"session_id": owned.metaclaw, "name": f"c{number}"},
        "/v1/checkpoint/save": {"session_id": owned.metaclaw, "name": f"c{number}"},
        "/v1/checkpoint/load": {"session_id": owned.metaclaw, "path": owned.metaclaw_state},
        "/v1/train/forward_backward": {"session_id": owned.metaclaw, "datums": [datum]},
        "/v1/train/optim_step": {"session_id": owned.metaclaw},
        "/v1/sample": {"session_id": owned.metaclaw, "tokens": tokens, "max_tokens": 2},
        "/train": {"model": "online", "pairs": [{"prompt": "a", "response": "b"}], "lora": {"rank": 2}},
        "/checkpoint": {"model": "online"},
    }


def _forward_backward(owned: HttpOwned, seq_id: int) -> bytes:
    def tensor(values: np.ndarray, dtype: int) -> tinker.Tensor:
        return tinker.Tensor(dense=values.tobytes(), dtype=dtype, shape=values.shape)

    inputs = {
        "target_tokens": tensor(TOKENS.astype(np.int64), 2),
        "weights": tensor(np.ones(len(TOKENS), np.float32), 1),
    }
    chunk = tinker.Chunk(encoded_text=tinker.EncodedTextChunk(tokens=TOKENS.tobytes()))
    datum = tinker.Datum(model_input=[chunk], loss_fn_inputs=inputs)
    message = tinker.ForwardBackwardRequest(model_id=owned.model, seq_id=seq_id, data=[datum], loss_fn="cross_entropy")
    return message.SerializeToString()

"""vLLM's parsers of a model's answers: which a sampler uses, and which fields of a chat have an effect on its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig
from vllm.renderers import BaseRenderer
from vllm.renderers.hf import HfRenderer, _cached_resolve_chat_template_kwargs, resolve_chat_template
from vllm.tokenizers import cached_tokenizer_from_config

from paceline.errors import InvalidArgument, UnknownField, Unsupported
from sampler_service.engine.protocol import EngineUnfit

AUTO = "auto"
_FAMILIES = {
    "glm4_moe": ("glm45", "glm45"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "seed_oss": ("seed_oss", "seed_oss"),
}
"""Parsers of tool calls and of reasoning, for model types all of whose models answer in one format."""
_OTHERS = ("hermes", "")
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of templates that requests set by fields of their own."""
_THINKING = frozenset({"reasoning_effort", "enable_thinking"})
"""Variables of templates that vLLM sets to what `reasoning_effort` says."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """vLLM's names of parsers; empty: none."""

    tool: str
    reasoning: str


def choose_parsers(tool: str, reasoning: str, config: ModelConfig) -> Parsers:
    """Return a model's parsers: those that are set, or its family's for `auto`.

    Raises EngineUnfit for a parser that vLLM does not know, or that needs tokens which the model does not have.
    """
    tool_of_family, reasoning_of_family = _FAMILIES.get(config.hf_config.model_type, _OTHERS)
    if {tool, reasoning} - {AUTO, "", "hermes"}:
        _check_named(tool, reasoning, config)
    return Parsers(tool_of_family if tool == AUTO else tool, reasoning_of_family if reasoning == AUTO else reasoning)


def _check_named(tool: str, reasoning: str, config: ModelConfig) -> None:
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415 - importing them takes a second
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

    named = (
        ("tool_parser", tool, ToolParserManager.list_registered(), ToolParserManager.get_tool_parser),
        ("reasoning_parser", reasoning, ReasoningParserManager.list_registered(),
         ReasoningParserManager.get_reasoning_parser),
    )  # fmt: skip
    for setting, name, known, get in named:
        if name in {AUTO, ""}:
            continue
        if name not in known:
            raise EngineUnfit(f"{setting}: vLLM has no parser {name!r}; take one of {', '.join(known)}, or {AUTO}")
        try:
            get(name)(cached_tokenizer_from_config(config))
        except Exception as error:
            raise EngineUnfit(f"{setting}: {name!r} does not fit the model's tokenizer: {error}") from error


def check_effects(body: dict[str, Any], parsers: Parsers, renderer: BaseRenderer, config: ModelConfig) -> None:
    """Refuse fields of a chat that would change nothing with this model.

    Raises Unsupported, UnknownField, InvalidArgument.
    """
    if body.get("include_reasoning") is False and not parsers.reasoning:
        message = (
            "has no effect without PACELINE_SAMPLER_REASONING_PARSER, which this sampler does not have; leave it out"
        )
        raise Unsupported(message, field="include_reasoning")
    if "parallel_tool_calls" in body and not body.get("tools"):
        raise InvalidArgument("is only for requests with tools; leave it out", field="parallel_tool_calls")
    given = body.get("chat_template_kwargs") or {}
    if not given and "reasoning_effort" not in body:
        return
    known = _template_variables(renderer, config, body.get("tools"))
    if known is None:  # What vLLM's own rendering uses cannot be told; nothing is refused.
        return
    if "reasoning_effort" in body and not known & _THINKING:
        raise Unsupported("has no effect on this model: its chat template does not use it", field="reasoning_effort")
    for name in given:
        if name not in known - _OWN:
            message = "is not a variable of the model's chat template; leave it out"
            raise UnknownField(message, field=f"chat_template_kwargs.{name[:80]}")


def _template_variables(renderer: BaseRenderer, config: ModelConfig, tools: Any) -> frozenset[str] | None:
    """Return the variables of the model's chat template; None if vLLM renders its chats without one."""
    if not isinstance(renderer, HfRenderer) or config.hf_config.model_type == "gpt_oss":
        return None
    template = resolve_chat_template(renderer.get_tokenizer(), None, tools, model_config=config)
    return frozenset(_cached_resolve_chat_template_kwargs(template)) if template else frozenset()

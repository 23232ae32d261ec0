"""Structured outputs: vLLM masks tokens that would violate a JSON Schema or regular expression, using xgrammar."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from paceline.errors import InvalidArgument
from paceline.types import SamplingParams
from sampler_service.engine.protocol import Turn
from sampler_service.engine.request_checks import check_constraint, check_tag
from sampler_service.engine.vllm.grammar_process import GrammarProcess


def structured_outputs(params: SamplingParams) -> StructuredOutputsParams | None:
    """Convert a request's constraint, if any, to vLLM's parameters."""
    if params.json_schema:
        return StructuredOutputsParams(json=params.json_schema)
    return StructuredOutputsParams(regex=params.regex) if params.regex else None


def check_constraints_once() -> None:
    """Have vLLM not convert constraints that `GrammarProcess` has built: it would at every request, in the event loop.

    Every request is checked here first. vLLM's check also turns a choice into a grammar, which is quick.
    """

    def check(sampling_params: VllmSamplingParams) -> None:
        constraint = sampling_params.structured_outputs
        if constraint is not None and constraint.choice:
            validate_xgrammar_grammar(sampling_params)

    backend_xgrammar.validate_xgrammar_grammar = check


async def check_constraint_of(constraint: StructuredOutputsParams | None, grammars: GrammarProcess, turn: Turn) -> None:
    """Refuse a constraint in vLLM's parameters that is not supported here.

    Raises InvalidArgument, OutOfRange, EngineUnavailable.
    """
    if constraint is None or constraint.json_object:
        return
    if constraint.json:
        schema = constraint.json if isinstance(constraint.json, str) else json.dumps(constraint.json)
        given = SamplingParams(json_schema=schema)
    else:
        choices = "|".join(re.escape(str(choice)) for choice in constraint.choice or ())
        given = SamplingParams(regex=constraint.regex or choices)
    if constraint.structural_tag:  # generated from tools, whose calls must match their schemas
        check_tag(constraint.structural_tag, "tools")
    elif given.json_schema or given.regex:
        check_constraint(given)
    else:
        raise InvalidArgument("takes json, regex, choice or json_object", field="structured_outputs")
    await _check_enforced(constraint, "structured_outputs", grammars, turn)


async def check_grammar(params: SamplingParams, grammars: GrammarProcess, turn: Turn = nullcontext) -> None:
    """Refuse a constraint from which no grammar can be built. Raises InvalidArgument, EngineUnavailable."""
    constraint = structured_outputs(params)
    if constraint is not None:
        field = "params.json_schema" if params.json_schema else "params.regex"
        await _check_enforced(constraint, field, grammars, turn)


async def _check_enforced(
    constraint: StructuredOutputsParams, field: str, grammars: GrammarProcess, turn: Turn
) -> None:
    if refusal := await grammars.refusal(constraint, turn):
        raise InvalidArgument(f"cannot be enforced: {_reason(refusal)}", field=field)


def _reason(message: str) -> str:
    """Return xgrammar's message without the source location in front."""
    return message.rpartition(".cc:")[2].partition(": ")[2].strip() or message

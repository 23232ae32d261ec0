"""OpenAI's API through vLLM's own serving layer, with this sampler's queueing, tenants and leased weights.

The layer accesses vLLM through an engine client. It is given a client that forwards everything except `generate`: there
each request gets the adapter that was leased for it, the tenant's salt for the prefix cache, and places in the queue.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm import SamplingParams as VllmSamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import PromptLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from paceline import errors
from paceline.chat.messages import content_format, with_text_arguments
from paceline.log import get_logger
from paceline.types import ModelInfo
from sampler_service.engine.protocol import TextEndpoint, TextRequest, Turn
from sampler_service.engine.request_checks import check_tokens, completion_budget
from sampler_service.engine.vllm.grammar import check_constraint_of
from sampler_service.engine.vllm.grammar_process import GrammarProcess
from sampler_service.engine.vllm.params import lora_request, scoring_params, text_params
from sampler_service.engine.vllm.parsers import Parsers, check_effects
from sampler_service.engine.vllm.tools import DemandedCalls, tool_use

_DATA, _DONE, _ERROR = "data: ", "[DONE]", b'{"error":'
_LINE_ENDS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
"""What ends a line in Unicode but may be in JSON unescaped; many clients split streams there, as Python does."""
_REASONING = ("reasoning_ended", "reasoning_parser_kwargs")
"""What the layer tells the engine of a chat's reasoning."""
_PROMPT = frozenset({"input_tokens", "input_text"})
"""Names in vLLM's errors of a prompt that is too long."""
_WRONG_TYPES = ("_type", "_parsing")
"""Ends of pydantic's names of errors of values that have the wrong type."""
_TYPES = frozenset({"str", "int", "float", "bool", "list", "dict", "tuple", "none"})
_log = get_logger(__name__)


@dataclass(slots=True)
class _TextCall:
    """A call in progress."""

    request: TextRequest
    model: str
    """Model name in the response."""
    sampling: int = 0
    """Number of its prompts that tokens are sampled for, or will be."""
    demands: str = ""
    """The field that demands tool calls which match their schemas; empty if none does."""
    prompt: str = "prompt"
    """The field that its prompts are in."""
    failure: BaseException | None = None
    """The original error from the engine, which the layer replaces by its own wording."""
    tool_calls: DemandedCalls | None = None
    """Those in its answer; None if it does not demand one."""

    def checked(self, part: bytes) -> bytes:
        """Return a part of the answer, unless the call has failed. Raises what it failed with."""
        if self.failure is not None:
            raise self.failure
        if part.startswith(_ERROR):
            raise _unforeseen()
        if self.tool_calls is not None:
            self.tool_calls.see(part)
        return part


_CALL: ContextVar[_TextCall] = ContextVar("paceline_text_call")


class TextServer:
    """Serves calls of OpenAI's API."""

    def __init__(self, llm: AsyncLLM, info: ModelInfo, grammars: GrammarProcess, parsers: Parsers) -> None:
        """`parsers` are those of the model's answers; without one for tool calls, tools are refused."""
        engine: Any = _Engine(llm, info, grammars)
        models = _Models(engine, [BaseModelPath(name=info.name, model_path=info.name)])
        self._info = info
        self._grammars = grammars
        self._parsers = parsers
        self._llm = llm
        renderer, self._chat = self._make_chat(llm, engine, models, parsers, "auto")
        _, self._constrained_chat = self._make_chat(llm, engine, models, parsers, "parameter")
        self._is_harmony = renderer.use_harmony
        self._completion = OpenAIServingCompletion(
            engine,
            models,
            online_renderer=renderer,
            request_logger=None,
            return_tokens_as_token_ids=False,
            enable_prompt_tokens_details=False,
            enable_force_include_usage=False,
            enable_per_request_metrics=False,
        )

    @staticmethod
    def _make_chat(
        llm: AsyncLLM, engine: Any, models: OpenAIServingModels, parsers: Parsers, tool_strict_level: str
    ) -> tuple[OnlineRenderer, OpenAIServingChat]:
        """Return vLLM's renderer and server of chats. Every option is set, since defaults may change.

        `tool_strict_level`: auto holds calls to the schemas of tools that are `strict`, parameter to those of all.
        """
        shared: dict[str, Any] = {
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": _content_format(llm),
            "default_chat_template_kwargs": None,
            "trust_request_chat_template": False,
            "enable_auto_tools": bool(parsers.tool),
            "tool_parser": parsers.tool or None,
            "reasoning_parser": parsers.reasoning,
            "tool_strict_level": tool_strict_level,
            # A model that sees tools may call them, and the markup of its calls would be in the text.
            "exclude_tools_when_tool_choice_none": True,
        }
        renderer = OnlineRenderer(
            engine.model_config, llm.renderer, trust_request_mm_kwargs=False, log_error_stack=False, **shared
        )
        chat = OpenAIServingChat(
            engine,
            models,
            "assistant",
            online_renderer=renderer,
            return_tokens_as_token_ids=False,
            enable_prompt_tokens_details=False,
            enable_force_include_usage=False,
            enable_log_outputs=False,
            enable_log_deltas=False,
            enable_per_request_metrics=False,
            **shared,
        )
        return renderer, chat

    async def complete(self, request: TextRequest) -> AsyncGenerator[bytes]:
        """Yield the response as JSON, whole or event by event. Raises InvalidArgument if the layer refuses the call."""
        call = _TextCall(request, str(request.body.get("model") or self._info.name))
        if request.endpoint is TextEndpoint.CHAT_COMPLETIONS:
            call.prompt = "messages"
        # The layer's own limit of tokens is not used, but it checks that one against the context.
        body = {**request.body, "model": self._info.name, "max_tokens": 1}
        token = _CALL.set(call)
        try:
            answer = await self._answer(request.endpoint, body, request.turn)
        except (
            VLLMValidationError,
            ValidationError,
            TemplateError,
            ValueError,
            TypeError,
            NotImplementedError,
        ) as error:
            raise call.failure or _refusal(error, call.prompt) from error
        finally:
            _CALL.reset(token)
        if call.failure is not None:
            raise call.failure
        if isinstance(answer, ErrorResponse) and answer.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _unforeseen()
        if isinstance(answer, ErrorResponse):
            raise errors.InvalidArgument(answer.error.message, field=answer.error.param or "")
        if not isinstance(answer, AsyncGenerator):
            yield call.checked(_encode(answer.model_dump_json()))
            return
        async with aclosing(_in_context(answer, call)) as events:
            async for event in events:
                yield call.checked(event)
        if call.failure is not None:
            raise call.failure

    async def _answer(self, endpoint: TextEndpoint, body: dict[str, Any], turn: Turn) -> Any:
        if endpoint is TextEndpoint.CHAT_COMPLETIONS:
            check_effects(body, self._parsers, self._llm.renderer, self._llm.model_config)
            use = tool_use(body)
            request = self._chat_request(use.body)
            # With tools, the layer converts a constraint itself, before it makes one of both and samples.
            await check_constraint_of(request.extract_structured_outputs(), self._grammars, turn)
            call = _CALL.get()
            call.demands = use.demands
            call.tool_calls = DemandedCalls() if use.demands == "tool_choice" else None
            chat = self._constrained_chat if use.is_constrained else self._chat
            return await chat.create_chat_completion(request)
        return await self._completion.create_completion(CompletionRequest.model_validate(body))

    def _chat_request(self, body: dict[str, Any]) -> ChatCompletionRequest:
        """Return a request whose messages are those of `read_messages`: vLLM's would reorder a call's fields."""
        messages: list[Any] = body["messages"]
        request = ChatCompletionRequest.model_validate({**body, "messages": []})
        request.messages = [*with_text_arguments(messages)] if self._is_harmony else messages
        return request


def _content_format(llm: AsyncLLM) -> str:
    """Return the format that the model's chat template reads content in, as training finds it."""
    tokenizer: Any = llm.renderer.get_tokenizer()
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    return content_format(render).value


async def _in_context(answer: AsyncGenerator[str], call: _TextCall) -> AsyncGenerator[bytes]:
    """Yield the data of server-sent events. Each step of the layer's generator runs with its call in the context."""
    async with aclosing(answer):
        while True:
            token = _CALL.set(call)
            try:
                text = await anext(answer, None)
            finally:
                _CALL.reset(token)
            if text is None:
                return
            for line in text.split("\n"):
                data = line.removeprefix(_DATA)
                if line.startswith(_DATA) and data != _DONE:
                    yield _encode(data)


def _unforeseen() -> errors.Internal:
    """Return the error of a failure in the serving layer itself, which has logged it."""
    unforeseen = errors.Internal.unforeseen()
    _log.error("vLLM's serving layer failed", error_id=unforeseen.error_id)
    return unforeseen


def _encode(text: str) -> bytes:
    """Encode JSON as a single line, by any definition of a line."""
    return text.translate(_LINE_ENDS).encode()


class _Models(OpenAIServingModels):
    """Reports the model by the name that the caller used."""

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        return _CALL.get().model


class _Engine:
    """vLLM's engine client, in which every request belongs to a call."""

    def __init__(self, llm: AsyncLLM, info: ModelInfo, grammars: GrammarProcess) -> None:
        self._llm = llm
        self._info = info
        self._grammars = grammars
        # The engine's own limit is one token longer, so that it can score sequences of the full length.
        self.model_config = copy.copy(llm.model_config)
        self.model_config.max_model_len = info.max_context_length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: VllmSamplingParams, request_id: str, **others: Any
    ) -> AsyncIterator[RequestOutput]:
        """Sample for the call in the current context."""
        call = _CALL.get()
        call.sampling += 1
        # Constraints of a chat hold from the end of its reasoning on, those of a text from its start.
        reasoning = {"reasoning_ended": True} | {name: others[name] for name in _REASONING if name in others}
        return self._read(call, prompt, sampling_params, request_id, reasoning)

    async def _read(
        self, call: _TextCall, prompt: Any, params: VllmSamplingParams, request_id: str, reasoning: dict[str, Any]
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as they are read; a slow reader delays only itself."""
        outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        sampling = asyncio.create_task(self._sample(call, prompt, params, request_id, reasoning, outputs))
        sampling.add_done_callback(lambda _: outputs.put_nowait(None))
        try:
            while (output := await outputs.get()) is not None:
                yield output
            await sampling
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def _sample(
        self,
        call: _TextCall,
        prompt: Any,
        params: VllmSamplingParams,
        request_id: str,
        reasoning: dict[str, Any],
        outputs: asyncio.Queue[RequestOutput | None],
    ) -> None:
        """Sample in a place of the queue, and release it, and with the last of a call its weights, at the end."""
        request, tokens = call.request, prompt.get("prompt_token_ids") or []
        try:
            check_tokens(self._info, tokens, call.prompt, reserved=1)
            if call.demands and params.structured_outputs is None:
                message = "needs a tool parser for which vLLM has a grammar; PACELINE_SAMPLER_TOOL_PARSER names it"
                raise errors.Unsupported(message, field=call.demands)
            await check_constraint_of(params.structured_outputs, self._grammars, request.turn)
            budget = completion_budget(self._info, len(tokens), request.sampling.params)
            params = text_params(request.sampling, params, budget)
            lora = lora_request(request.adapter) if request.adapter else None
            prompt["cache_salt"] = request.tenant or None
            async with request.place(len(tokens), params.n, budget) as priority:
                scored = await self._score(prompt, request, request_id, lora, priority)
                generated = self._llm.generate(
                    prompt, params, request_id, lora_request=lora, priority=priority, **reasoning
                )
                try:
                    async with aclosing(generated) as source:
                        async for output in source:
                            _check(output, request)
                            output.prompt_logprobs = scored
                            if params.n < request.sampling.num_samples:
                                copies = range(request.sampling.num_samples)
                                output.outputs = [replace(output.outputs[0], index=index) for index in copies]
                            outputs.put_nowait(output)
                except EngineGenerateError as error:
                    await self._llm.abort(request_id)  # vLLM goes on counting a request that it could not send
                    if isinstance(error.__cause__, OverflowError):
                        raise errors.InvalidArgument(
                            f"a number is too large to sample with: {error.__cause__}"
                        ) from error
                    raise
        except errors.PacelineError as error:
            call.failure = error
            raise
        except VLLMValidationError as error:
            call.failure = _refusal(error, call.prompt)
            raise
        call.sampling -= 1
        if not call.sampling:
            request.ended()

    async def _score(
        self, prompt: Any, request: TextRequest, request_id: str, lora: LoRARequest | None, priority: int
    ) -> PromptLogprobs | None:
        """Score a prompt once for all its samples, if the call asks for that."""
        k = request.sampling.prompt_logprobs
        if k is None:
            return None
        name = f"{request_id}-score"
        outputs = self._llm.generate(prompt, scoring_params(k), name, lora_request=lora, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                if (scored := output.prompt_logprobs) is not None:
                    own = zip(output.prompt_token_ids or (), scored, strict=True)
                    request.scored(position[token].logprob for token, position in own if position)
                    return scored
        raise errors.EngineUnavailable("the engine stopped before the prompt was scored; try again")


def _check(output: RequestOutput, request: TextRequest) -> None:
    """Check that no token was sampled from NaN and none was aborted. Raises NonFinite, EngineUnavailable."""
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise errors.EngineUnavailable("the engine stopped before the answer was complete; try again")
        positions = completion.logprobs or ()
        new = zip(completion.token_ids, positions, strict=False)
        request.see(position[token].logprob for token, position in new if position and token in position)


def _refusal(error: Exception, prompt: str) -> errors.PacelineError:
    """Convert an error of the serving layer into InvalidArgument or SequenceTooLong.

    `prompt` is the field that the prompt is in.
    """
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        message, field, kind = str(first["msg"]), _field(first["loc"]), str(first["type"])
        if kind == "missing":
            return errors.MissingField("is not set", field=field)
        metadata = {"wanted": message} if kind.endswith(_WRONG_TYPES) else {}
        return errors.InvalidArgument(message, field=field, metadata=metadata)
    if isinstance(error, TemplateError):
        return errors.InvalidArgument(f"the model's chat template does not take them: {error}", field="messages")
    if not isinstance(error, VLLMValidationError):
        return errors.InvalidArgument(str(error))
    message, field = str(error.args[0]), error.parameter or ""
    if field in _PROMPT:
        return errors.SequenceTooLong(message, field=prompt)
    return errors.InvalidArgument(message, field=field)


def _field(place: Sequence[str | int]) -> str:
    """Return the field at a place in the body, without the names of the types that were tried there."""
    named = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if not _is_type(part)]
    return "".join(named).removeprefix(".")


def _is_type(part: str | int) -> bool:
    return isinstance(part, str) and (part in _TYPES or not part.replace("_", "").isalnum() or part[:1].isupper())

"""Takes a request's tokens directly from vLLM's output processor.

vLLM creates several objects for every token of every request and wakes a task, which forwards them through generators.
Here a token and its log-probability go to the request's coalescer as they arrive from the engine's process, and the
coalescer decides when the reader's task wakes. Anything else that comes with tokens goes through vLLM's own conversion.

With the coalescer's delayed wakeups, the service's process passes on 2.4 times as many tokens a CPU second. That is
felt where a GPU samples thousands of tokens a second, not on a CPU (bench/results/mechanisms.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import vllm
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats

from sampler_service.engine.coalescer import Coalescer
from sampler_service.engine.decoding import stream_after
from sampler_service.engine.protocol import EngineUnfit, GenerationRequest, TokenDelta
from sampler_service.engine.vllm.params import lora_request, prompt_input, put_tokens


class RequestTokens(RequestOutputCollector):
    """Replaces the collector that vLLM creates for each request."""

    def __init__(self, request: GenerationRequest, params: SamplingParams, tokens: Coalescer) -> None:
        super().__init__(params.output_kind, request.request_id)
        self._tokens, self._topk = tokens, request.topk_logprobs
        self.ended = False
        """Whether vLLM has already dropped the request."""

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Accept the new tokens of a step. Never raises, because vLLM's caller serves all requests."""
        if isinstance(output, RequestOutput):
            self._take(output)
        elif isinstance(output, Exception):
            self.ended = isinstance(output, EngineDeadError)
            self._tokens.close(output)

    def take_plain(self, state: RequestState, output: EngineCoreOutput) -> bool:
        """Accept an unfinished completion's new tokens if they carry only log-probabilities; return whether they do."""
        logprobs = output.new_logprobs
        if (
            logprobs is None
            or output.finish_reason is not None
            or state.is_prefilling
            or self._topk
            # Other detokenizers look for stop strings.
            or type(state.detokenizer) is not IncrementalDetokenizer
        ):
            return False
        values = logprobs.logprobs[:, 0].tolist()
        self._tokens.put(TokenDelta(state.request_index, output.new_token_ids, values))
        return True

    def _take(self, output: RequestOutput) -> None:
        try:
            put_tokens(output, self._topk, self._tokens)
        except Exception as error:  # raised by the reader instead
            self._tokens.close(error)
        if output.finished:
            self.ended = True
            self._tokens.close()


class TokenTap(OutputProcessor):
    """vLLM's output processor, which plain tokens bypass."""

    def __init__(self, replaced: OutputProcessor) -> None:
        """Copy all attributes of the processor to replace, known or not. It must not have had any requests."""
        vars(self).update(vars(replaced))
        self._tapped: dict[str, RequestTokens] = {}

    @classmethod
    def install(cls, llm: AsyncLLM) -> TokenTap:
        """Replace vLLM's output processor. Raises EngineUnfit if this vLLM delivers its output in an unknown way."""
        if type(llm.output_processor) is not OutputProcessor or llm.output_handler is not None:
            raise EngineUnfit(
                f"vLLM {vllm.__version__} does not use its OutputProcessor, or has already started it; install the "
                "version that requirements/ pins, or set PACELINE_SAMPLER_OUTPUTS=stock"
            )
        llm.output_processor = tap = cls(llm.output_processor)
        return tap

    @asynccontextmanager
    async def generate(
        self, llm: AsyncLLM, request: GenerationRequest, params: SamplingParams, tokens: Coalescer
    ) -> AsyncIterator[None]:
        """Start a request whose tokens go into the coalescer. Leaving early frees it before the engine's next step."""
        prompt = prompt_input(request.prompt, request.tenant)
        lora = lora_request(request.adapter) if request.adapter else None
        name = request.request_id
        self._tapped[name] = tapped = RequestTokens(request, params, tokens)
        try:
            # Here constraints hold from the first token on, also of models whose answers begin with reasoning.
            added = await llm.add_request(
                name, prompt, params, lora_request=lora, priority=request.priority, reasoning_ended=True
            )
            try:
                yield
            finally:
                if not tapped.ended:
                    await llm.abort(added.request_id, internal=True)
        finally:
            del self._tapped[name]

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        """Register a request; the tokens of one that `generate` started go to its RequestTokens.

        vLLM's decoder repeats a prompt that ends within a character as the completion's, so it is replaced.
        """
        tapped = self._tapped.get(request.external_req_id or "")
        super().add_request(request, prompt, parent_req, request_index, tapped or queue, *others, **named)
        state = self.request_states[request.request_id]
        if isinstance(decoder := state.detokenizer, FastIncrementalDetokenizer):
            tokens, skip = request.prompt_token_ids or [], decoder.skip_special_tokens
            decoder.stream = stream_after(decoder.tokenizer, tokens, skip_special_tokens=skip)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
        *others: Any,
        **named: Any,
    ) -> OutputProcessorOutput:
        """Pass a step's tokens to their requests."""
        rest = [output for output in engine_core_outputs if not self._take(output, weight_version)]
        return super().process_outputs(rest, engine_core_timestamp, iteration_stats, weight_version, *others, **named)

    def _take(self, output: EngineCoreOutput, weight_version: str | None) -> bool:
        state = self.request_states.get(output.request_id)
        if state is None or not isinstance(state.queue, RequestTokens) or not state.queue.take_plain(state, output):
            return False
        # vLLM's conversion of later tokens needs this state.
        if weight_version is not None:
            state.track_weight_version(weight_version)
        if state.detokenizer is not None:
            state.detokenizer.token_ids.extend(output.new_token_ids)
        return True

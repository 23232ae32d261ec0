"""Takes a request's tokens from vLLM's own conversion and generators (the alternative to `output_collector`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from sampler_service.engine.coalescer import Coalescer
from sampler_service.engine.protocol import GenerationRequest
from sampler_service.engine.vllm.params import lora_request, prompt_input, token_delta


@dataclass(frozen=True, slots=True)
class StockLlm:
    """vLLM with its own output conversion and generators."""

    llm: AsyncLLM

    @asynccontextmanager
    async def generate(
        self, request: GenerationRequest, params: SamplingParams, tokens: Coalescer
    ) -> AsyncIterator[Coalescer]:
        """Start a request whose tokens go into the coalescer. Leaving early frees it before the engine's next step."""
        prompt = prompt_input(request.prompt, request.tenant)
        lora = lora_request(request.adapter) if request.adapter else None
        outputs = self.llm.generate(prompt, params, request.request_id, lora_request=lora)
        passing = asyncio.create_task(_pass_on(outputs, request.topk_logprobs, tokens))
        try:
            yield tokens
        finally:
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)


async def _pass_on(outputs: AsyncGenerator[RequestOutput], topk: int, tokens: Coalescer) -> None:
    try:
        async with aclosing(outputs):
            async for output in outputs:
                put_tokens(output, topk, tokens)
    except Exception as error:  # raised by the reader instead
        tokens.close(error)
    else:
        tokens.close()


def put_tokens(output: RequestOutput, topk: int, tokens: Coalescer) -> None:
    """Put a step's tokens, as converted by vLLM, into the coalescer."""
    for completion in output.outputs:
        delta = token_delta(completion, topk)
        delta.prompt_cache_hit_tokens = output.num_cached_tokens or 0
        tokens.put(delta)

"""What vLLM samples for a request, taken where vLLM hands it over.

vLLM wakes a task for every token of every request, which passes it on through generators of its own. A feed is called
instead, and the reader's task wakes when the coalescer says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from sampler_service.engine.base import GenerationRequest
from sampler_service.engine.coalescer import Coalescer
from sampler_service.engine.vllm_params import lora_request, prompt_input, token_delta


class Feed:
    """Stands in for the collector that vLLM makes for each request."""

    def __init__(self, tokens: Coalescer, topk: int) -> None:
        self._tokens, self._topk = tokens, topk
        self.ended = False
        """Whether vLLM knows the request no more."""

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Take the new tokens of a step. Raises nothing: vLLM's caller serves every request."""
        if isinstance(output, RequestOutput):
            self._take(output)
        elif isinstance(output, Exception):
            self.ended = isinstance(output, EngineDeadError)
            self._tokens.close(output)

    def _take(self, output: RequestOutput) -> None:
        try:
            for completion in output.outputs:
                delta = token_delta(completion, self._topk)
                delta.prompt_cache_hit_tokens = output.num_cached_tokens or 0
                self._tokens.put(delta)
        except Exception as error:  # the reader raises it
            self._tokens.close(error)
        if output.finished:
            self.ended = True
            self._tokens.close()


@asynccontextmanager
async def fed(
    llm: AsyncLLM, request: GenerationRequest, params: SamplingParams, tokens: Coalescer
) -> AsyncIterator[Coalescer]:
    """Have vLLM put a request's tokens here. A request that has not ended by the end is freed before the next step."""
    prompt = prompt_input(request.prompt, request.tenant)
    lora = lora_request(request.adapter) if request.adapter else None
    collector = await llm.add_request(request.request_id, prompt, params, lora_request=lora)
    feed = Feed(tokens, request.topk_logprobs)
    try:
        early = collector.get_nowait()
        collector.put = feed.put  # type: ignore[method-assign]
        if early is not None:
            feed.put(early)
        yield tokens
    finally:
        if not feed.ended:
            await llm.abort(collector.request_id, internal=True)

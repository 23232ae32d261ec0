"""The arms of `python -m bench.sample` that call vLLM in their own process.

    python -m bench.sample.engine_arms KIND MODEL DTYPE ADAPTER SETTINGS

KIND is "as served" (the sampler service's own arguments), "stock operators" (the same with vLLM's LoRA operators) or
"no adapters" (the same without LoRA). Prints `{}` once the engine is up, then reads one JSON load per line and answers
each with a timing. ADAPTER is a PEFT directory, or empty; SETTINGS are more settings of the engine, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TextIO, cast

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from bench.sample.load import KV_CACHE_GIB, MAX_MODEL_LEN, MAX_NUM_SEQS, RANK, Load, run_load
from paceline.types import SamplingParams
from sampler_service.engine.options import Dtype, EngineOptions
from sampler_service.engine.protocol import Adapter, GenerationRequest
from sampler_service.engine.vllm import engine as vllm_engine
from sampler_service.engine.vllm.params import lora_request, prompt_input, sampling_params

KINDS = ("as served", "stock operators", "no adapters")


def engine_args(kind: str, model: Path, dtype: Dtype, settings: dict[str, Any]) -> AsyncEngineArgs:
    """Return the sampler service's arguments for vLLM, without what the kind leaves out."""
    options = EngineOptions(
        model_path=model,
        model_name="bench",
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_lora_rank=RANK,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_gib=KV_CACHE_GIB,
        **settings,
    )
    args = vllm_engine.engine_args(options)
    if kind != "as served":
        args.worker_cls = "auto"
    if kind == "no adapters":
        args.enable_lora = False
        # On a CPU vLLM runs eagerly with adapters; do so here too, so that the kinds differ only in the adapters.
        args.enforce_eager = args.enforce_eager or current_platform.is_cpu()
    return args


class Engine:
    """Serves loads by calling vLLM."""

    def __init__(self, llm: AsyncLLM, adapter: Adapter | None) -> None:
        self._llm, self._adapter, self._ids = llm, adapter, count()

    async def run(self, load: Load) -> dict[str, object]:
        """Serve a round."""
        adapter = self._adapter if load.adapter else None
        lora = lora_request(adapter) if adapter else None

        async def open_stream(prompt: list[int]) -> AsyncIterator[int]:
            name = f"bench-{next(self._ids)}"
            request = GenerationRequest(name, prompt, SamplingParams(ignore_eos=True), adapter=adapter)
            params = sampling_params(request, load.tokens)
            async for output in self._llm.generate(prompt_input(prompt, ""), params, name, lora_request=lora):
                yield sum(len(completion.token_ids) for completion in output.outputs)

        return asdict(await run_load(load, open_stream))


async def serve(args: AsyncEngineArgs, directory: str, answers: TextIO) -> None:
    """Answer loads until the input ends."""
    llm = AsyncLLM.from_engine_args(args)
    adapter = Adapter(1, "bench", Path(directory)) if directory else None
    if adapter:
        await llm.add_lora(lora_request(adapter))
    engine = Engine(llm, adapter)
    print("{}", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await engine.run(Load(**json.loads(line)))), file=answers, flush=True)
    llm.shutdown()


def main(kind: str, model: str, dtype: str, adapter: str, settings: str) -> None:
    """Run one arm."""
    if kind not in KINDS:
        raise SystemExit(f"unknown kind {kind!r}; choose one of {KINDS}")
    # vLLM prints to standard output too: redirect that to standard error, and keep the original for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    args = engine_args(kind, Path(model), cast("Dtype", dtype), json.loads(settings))
    uvloop.run(serve(args, adapter, answers))


if __name__ == "__main__":
    main(*sys.argv[1:])

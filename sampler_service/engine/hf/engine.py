"""The sampler engine built on transformers and PEFT, for hardware without vLLM, and the reference in tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.base_model.model_directory import check_directory, check_tied
from paceline.errors import EngineUnavailable, Unsupported
from paceline.types import ModelInfo, SamplingParams, StopReason, TopkLogprobs
from paceline.types.training import Array
from sampler_service.engine.coalescer import Coalescer, ReaderGroup
from sampler_service.engine.hf.adapters import AdapterBank
from sampler_service.engine.hf.batch import Batcher, Job
from sampler_service.engine.hf.sampling import sequence_logprobs
from sampler_service.engine.hf.startup_checks import shares_a_cache, use_fast_attention
from sampler_service.engine.model_files import check_tokenizer, fit, whole
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Adapter, GenerationRequest, LoadTimes, Slots, TextRequest, TokenDelta, Turn
from sampler_service.engine.request_checks import check_loaded, check_tokens, completion_budget, refuse_constraint


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request as seen by its reader."""

    job: Job
    open: set[int]
    """Indices of the completions that have not ended."""
    deltas: Coalescer


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: PreTrainedModel
    bank: AdapterBank
    batcher: Batcher
    info: ModelInfo


class HfEngine:
    """Implements SamplerEngine. Only one thread touches the model; everything else stays in the event loop."""

    name = "hf"
    version = transformers.__version__

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        self._loaded: _Loaded | None = None
        self._waiting: list[_Ticket] = []
        self._running: dict[Job, _Ticket] = {}
        self._readers = ReaderGroup()
        self._wake = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    def describe(self) -> ModelInfo:
        return self._live().info

    def slots(self) -> Slots:
        return Slots()

    def num_running(self) -> int:
        return sum(len(ticket.open) for ticket in self._tickets())

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._loaded = await loop.run_in_executor(self._thread, load, self._options)
        self._driver = loop.create_task(self._drive(self._loaded.batcher))

    async def stop(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
        for ticket in self._tickets():
            for index in sorted(ticket.open):
                ticket.deltas.put(TokenDelta(index, [], [], StopReason.ABORTED))
            ticket.deltas.close()
        self._loaded = None
        await asyncio.to_thread(self._thread.shutdown)

    async def check_health(self) -> None:
        self._live()

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        start = perf_counter()
        seconds = await asyncio.get_running_loop().run_in_executor(self._thread, self._add, adapter)
        return LoadTimes(1e3 * (perf_counter() - start - seconds), 1e3 * seconds)

    async def remove_adapter(self, adapter: Adapter) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._live().bank.remove, adapter)

    async def check_constraint(self, params: SamplingParams, turn: Turn) -> None:
        del turn
        refuse_constraint(params)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        info = self._live().info
        check_tokens(info, request.prompt, "prompt", reserved=1)
        check_loaded(request.adapter, self._live().bank.loaded)
        budget = completion_budget(info, len(request.prompt), request.params)
        refuse_constraint(request.params)
        score = await self._prompt_score(request)
        self._live()  # it may have died meanwhile, and nobody would answer
        deltas = Coalescer(self._readers, request.delivery)
        ticket = _Ticket(Job(request, budget), set(range(request.num_samples)), deltas)
        self._waiting.append(ticket)
        self._wake.set()
        try:
            async for delta in ticket.deltas:
                if score is not None:
                    delta.prompt_logprobs, delta.topk_prompt_logprobs, score = *score, None
                yield delta
        finally:
            ticket.job.cancelled = True
            self._running.pop(ticket.job, None)
            self._waiting = [other for other in self._waiting if other is not ticket]

    async def compute_logprobs(
        self, tokens: list[int], adapter: Adapter | None, tenant: str, priority: int = 0
    ) -> Array:
        check_tokens(self._live().info, tokens, "tokens")
        check_loaded(adapter, self._live().bank.loaded)
        logprobs, _ = await self._score(tokens, adapter, 0)
        return logprobs

    def _add(self, adapter: Adapter) -> float:
        start = perf_counter()
        self._live().bank.add(adapter)
        return perf_counter() - start

    def _live(self) -> _Loaded:
        if self._loaded is None:
            raise EngineUnavailable("the engine is not running")
        return self._loaded

    def _tickets(self) -> Iterable[_Ticket]:
        return [*self._waiting, *self._running.values()]

    async def _drive(self, batcher: Batcher) -> None:
        """Run steps while there is work. A failed step ends the engine, because its state can no longer be trusted."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            try:
                deltas = await loop.run_in_executor(self._thread, batcher.step, self._admit())
            except Exception:
                self._loaded = None
                for ticket in self._tickets():
                    ticket.deltas.close(EngineUnavailable("the engine died; it is restarting"))
                raise
            for job, delta in deltas:
                self._hand_out(job, delta)
            if not deltas and not self._waiting:
                self._wake.clear()

    def _hand_out(self, job: Job, delta: TokenDelta) -> None:
        """Pass tokens to their reader. A completion that ends frees its place at once, read or not."""
        ticket = self._running.get(job)
        if ticket is None:
            return
        ticket.deltas.put(delta)
        if delta.stop_reason is not None:
            ticket.open.discard(delta.index)
        if not ticket.open:
            del self._running[job]
            ticket.deltas.close()

    def _admit(self) -> list[Job]:
        """Admit waiting requests in the order of their priority while their completions fit.

        Of a negative priority, one always fits: it takes part in the next step, whatever others run.
        """
        count = sum(len(ticket.open) for ticket in self._running.values())
        self._waiting.sort(key=lambda ticket: ticket.job.request.priority)
        admitted: list[Job] = []
        while self._waiting:
            ticket = self._waiting[0]
            fits = count + len(ticket.open) <= self._options.max_num_seqs
            if count and not fits and ticket.job.request.priority >= 0:
                break
            del self._waiting[0]
            count += len(ticket.open)
            self._running[ticket.job] = ticket
            admitted.append(ticket.job)
        return admitted

    async def complete_text(self, request: TextRequest) -> AsyncGenerator[bytes]:
        raise Unsupported("OpenAI's API is served by vLLM; start the sampler with engine=vllm")
        yield b""  # makes it a generator

    async def _prompt_score(self, request: GenerationRequest) -> tuple[Array, TopkLogprobs | None] | None:
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return None
        return await self._score(request.prompt, request.adapter, request.topk_prompt_logprobs)

    async def _score(self, tokens: list[int], adapter: Adapter | None, k: int) -> tuple[Array, TopkLogprobs | None]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _score, self._live(), tokens, adapter, k)


@torch.inference_mode()
def _score(loaded: _Loaded, tokens: list[int], adapter: Adapter | None, k: int) -> tuple[Array, TopkLogprobs | None]:
    loaded.bank.activate(adapter)
    ids = torch.tensor(tokens, device=loaded.model.device)
    logits = loaded.model(input_ids=ids[None], use_cache=False).logits[0]
    logprobs, topk = sequence_logprobs(logits, ids, k)
    return logprobs.numpy(), topk


def load(options: EngineOptions) -> _Loaded:
    """Load a model from its directory. Raises what a damaged or unknown one is refused with."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with fit(options.model_path):
        if options.model_path.exists():  # otherwise it is an id on a hub
            check_directory(options.model_path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            options.model_path,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused by name.
        )
        model = whole(loaded)
        check_tied(model)
        tokenizer = check_tokenizer(options.model_path)
    torch.nn.Module.to(model, device).requires_grad_(requires_grad=False)
    use_fast_attention(model, tokenizer.encode)
    config = model.config.get_text_config()
    info = ModelInfo(
        name=options.model_name,
        max_context_length=options.max_model_len or config.max_position_embeddings,
        vocab_size=config.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        max_lora_rank=options.max_lora_rank,
        num_layers=config.num_hidden_layers,
    )
    bank = AdapterBank(model, options.max_lora_rank)
    eos = _eos_ids(model.generation_config.eos_token_id) | _eos_ids(tokenizer.eos_token_id)
    is_cached = shares_a_cache(model, tokenizer.encode, Batcher(model, bank, tokenizer.backend_tokenizer, eos))
    return _Loaded(model, bank, Batcher(model, bank, tokenizer.backend_tokenizer, eos, is_cached=is_cached), info)


def _eos_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)

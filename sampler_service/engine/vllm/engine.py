"""The sampler engine built on vLLM's AsyncLLM. It runs in the caller's event loop; vLLM runs the model in processes."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Set
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from errno import ENOENT
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING
from uuid import uuid4

import psutil
import torch
import vllm
import vllm.envs
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from paceline.base_model.weight_sharing import clear
from paceline.errors import EngineUnavailable, InvalidArgument, InvalidShape
from paceline.files.own_directory import OwnDirectory
from paceline.log import get_logger
from paceline.types import ModelInfo, SamplingParams, TopkLogprobs
from paceline.types.training import Array
from sampler_service.engine.coalescer import Coalescer, ReaderGroup
from sampler_service.engine.liveness import while_alive
from sampler_service.engine.model_files import (
    LinearShapes,
    check_adapter,
    check_model,
    check_tokenizer,
    fit,
    read_adapter,
    stored_dtype,
)
from sampler_service.engine.options import NO_FLOAT32, Dtype, EngineOptions
from sampler_service.engine.protocol import (
    Adapter,
    EngineUnfit,
    GenerationRequest,
    LoadTimes,
    Slots,
    TextRequest,
    TokenDelta,
    Turn,
)
from sampler_service.engine.request_checks import check_loaded, check_tokens, completion_budget
from sampler_service.engine.vllm.cpu import mid_step_loads
from sampler_service.engine.vllm.cpu.kv_cache import clear_new_blocks
from sampler_service.engine.vllm.grammar import check_constraints_once, check_grammar
from sampler_service.engine.vllm.grammar_process import GrammarProcess
from sampler_service.engine.vllm.params import (
    lora_request,
    prompt_input,
    prompt_logprobs,
    put_tokens,
    sampling_params,
    scoring_params,
    topk_rows,
)
from sampler_service.engine.vllm.parsers import Parsers, choose_parsers
from sampler_service.engine.vllm.scheduler import FairAsyncScheduler, FairScheduler, num_at_once, use_scheduler
from sampler_service.engine.vllm.version_check import check_text
from sampler_service.engine.vllm.worker.weight_export import LOAD_FORMAT, extra_config

if TYPE_CHECKING:
    from sampler_service.engine.vllm.direct_output import TokenTap
    from sampler_service.engine.vllm.openai_text import TextServer

_log = get_logger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as its max_lora_rank."""

MAX_TOPK = 1024
"""Most top log-probabilities per position that a request may ask for; the service's own limit is what users see."""

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"

_LONGEST_SOCKET_PATH = 107
"""Most bytes in the path of a Unix socket under Linux."""

CPU_BLOCK_SIZE = 32
"""Tokens per block of the KV cache on CPUs: the smallest that vLLM accepts, so that short prompts are shared too."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that runs, and what was found out about it when it started."""

    llm: AsyncLLM
    tap: TokenTap | None
    """Takes tokens from vLLM directly; None if they leave by vLLM's own conversion and generators."""
    info: ModelInfo
    linear: LinearShapes
    grammars: GrammarProcess
    parsers: Parsers
    sockets: OwnDirectory | None
    """Directory of vLLM's sockets; None if it has none of its own."""
    slots: Slots = field(default_factory=Slots)


class VllmEngine:
    """Implements SamplerEngine."""

    name = "vllm"
    version = vllm.__version__

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._started: RunningEngine | None = None
        self._open: set[str] = set()
        self._readers = ReaderGroup()
        self._adapters: set[int] = set()
        self._text: tuple[AsyncLLM, TextServer] | None = None
        self._making_text = asyncio.Lock()

    def describe(self) -> ModelInfo:
        return self._live().info

    def slots(self) -> Slots:
        return self._live().slots

    def num_running(self) -> int:
        return self._started.llm.get_num_unfinished_requests() if self._started else 0

    async def start(self) -> None:
        prepare_environment()
        check_constraints_once()
        # Slow work here runs in threads, because models are also loaded while the service is running.
        linear = await asyncio.to_thread(check_model, self._options.model_path)
        config = await asyncio.to_thread(_engine_config, self._options)
        if config.use_v2_model_runner:
            _log.warning("using model runner V2, with which nothing here was tested", variable=RUNNER_VARIABLE)
        model = config.model_config
        if model.dtype is torch.float32 and not current_platform.is_cpu():
            raise EngineUnfit(NO_FLOAT32)
        options = self._options
        parsers = await asyncio.to_thread(choose_parsers, options.tool_parser, options.reasoning_parser, model)
        config.structured_outputs_config.reasoning_parser = parsers.reasoning
        info = ModelInfo(
            name=self._options.model_name,
            max_context_length=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            dtype=str(model.dtype).removeprefix("torch."),
            max_lora_rank=self._options.max_lora_rank,
            num_layers=model.get_total_num_hidden_layers(),
        )
        # vLLM samples a token after every prompt. A context of one more lets sequences of the full context length be
        # scored; that position is never computed.
        model.max_model_len += 1
        if current_platform.is_cpu():
            clear_new_blocks(config)
            if model.is_moe and config.lora_config is not None:
                # Otherwise vLLM prepares experts for adapters too, and computes them with Triton in every request.
                config.lora_config.target_modules = sorted({name.rpartition(".")[2] for name in linear})
        else:
            use_scheduler(config, FairScheduler, FairAsyncScheduler)
        with _own_sockets() as sockets:
            llm = await asyncio.to_thread(_make_llm, config, self._options.model_path)
        self._started = RunningEngine(
            llm, _tap(llm, self._options), info, linear, GrammarProcess(config), parsers, sockets
        )
        direct = self._options.apply == "direct"
        preparing = llm.collective_rpc("prepare_adapters", kwargs={"direct": direct})
        sizes: list[int] = await while_alive(self.check_health, preparing)
        if direct and config.parallel_config.distributed_executor_backend is UniProcExecutor:
            await llm.engine_core.call_utility_async(mid_step_loads.METHOD)
        left_out = llm.collective_rpc("unmatched_adapter_modules", args=(sorted(linear),))
        unserved = set.intersection(*map(set, await while_alive(self.check_health, left_out)))
        self._started = replace(
            self._started,
            slots=Slots(self._options.max_active_versions, sum(sizes)),
            info=replace(info, unserved_modules=tuple(sorted(unserved))),
        )

    async def stop(self) -> None:
        if self._started is None:
            return
        started, llm = self._started, self._started.llm
        await llm.abort(sorted(self._open))
        self._started = None
        started.grammars.close()
        _shut_down(llm)
        if started.sockets is not None:
            started.sockets.close()
        if self._options.base_dir is not None:
            clear(self._options.base_dir)

    async def check_health(self) -> None:
        with translated():
            await self._live().llm.check_health()

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        engine = self._live()
        shapes = await asyncio.to_thread(read_adapter, adapter.path)
        check_adapter(shapes, engine.linear, self._options.max_lora_rank)
        _check_served(shapes.modules.keys() & set(engine.info.unserved_modules))
        with translated():
            start = perf_counter()
            call = (adapter.adapter_id, adapter.name, str(adapter.path), adapter.in_memory)
            answers: list[tuple[float, bool] | None] = await engine.llm.collective_rpc("load_adapter", args=call)
            loaded = [answer for answer in answers if answer is not None]
            if len(loaded) < len(answers):
                await engine.llm.remove_lora(adapter.adapter_id)
                raise FileNotFoundError(ENOENT, "the adapter's files were removed while they were loaded", adapter.path)
        seconds = max(seconds for seconds, _ in loaded)
        waited = perf_counter() - start - seconds
        self._adapters.add(adapter.adapter_id)
        return LoadTimes(1e3 * waited, 1e3 * seconds, all(in_slot for _, in_slot in loaded))

    async def remove_adapter(self, adapter: Adapter) -> None:
        self._adapters.discard(adapter.adapter_id)
        with translated():
            await self._live().llm.remove_lora(adapter.adapter_id)

    async def check_constraint(self, params: SamplingParams, turn: Turn) -> None:
        await check_grammar(params, self._live().grammars, turn)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        engine = self._live()
        check_tokens(engine.info, request.prompt, "prompt", reserved=1)
        check_loaded(request.adapter, self._adapters)
        budget = completion_budget(engine.info, len(request.prompt), request.params)
        await check_grammar(request.params, engine.grammars)
        with translated():
            params = sampling_params(request, budget)
            score = await self._prompt_score(request)
            with self._opened(request.request_id):
                tokens = Coalescer(self._readers, request.delivery)
                generate = _generate if engine.tap is None else engine.tap.generate
                async with generate(engine.llm, request, params, tokens):
                    async for delta in tokens:
                        if score is not None:
                            delta.prompt_logprobs, delta.topk_prompt_logprobs, score = *score, None
                        yield delta

    async def compute_logprobs(
        self, tokens: list[int], adapter: Adapter | None, tenant: str, priority: int = 0
    ) -> Array:
        engine = self._live()
        check_tokens(engine.info, tokens, "tokens")
        check_loaded(adapter, self._adapters)
        with translated():
            logprobs, _ = await self._score(tokens, adapter, tenant, priority, 0)
        return logprobs

    async def complete_text(self, request: TextRequest) -> AsyncGenerator[bytes]:
        engine = self._live()
        check_loaded(request.adapter, self._adapters)
        text = await self._text_server(engine)
        with translated():
            async with aclosing(text.complete(request)) as parts:
                async for part in parts:
                    yield part

    async def _text_server(self, engine: RunningEngine) -> TextServer:
        """Return the server of OpenAI's API, created at the first call: importing its libraries takes a second."""

        def make() -> TextServer:
            from sampler_service.engine.vllm.openai_text import TextServer  # noqa: PLC0415

            check_text()
            return TextServer(engine.llm, engine.info, engine.grammars, engine.parsers)

        async with self._making_text:
            if self._text is None or self._text[0] is not engine.llm:
                self._text = engine.llm, await asyncio.to_thread(make)
        return self._text[1]

    def _live(self) -> RunningEngine:
        if self._started is None:
            raise EngineUnavailable("the engine is not running")
        return self._started

    @contextmanager
    def _opened(self, name: str) -> Iterator[None]:
        """Register a request, so that `stop` aborts it."""
        self._open.add(name)
        try:
            yield
        finally:
            self._open.discard(name)

    async def _prompt_score(self, request: GenerationRequest) -> tuple[Array, TopkLogprobs | None] | None:
        """Score the prompt once for all samples, which then hit it in the prefix cache."""
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return None
        k = request.topk_prompt_logprobs
        return await self._score(request.prompt, request.adapter, request.tenant, request.priority, k)

    async def _score(
        self, tokens: list[int], adapter: Adapter | None, tenant: str, priority: int, k: int
    ) -> tuple[Array, TopkLogprobs | None]:
        llm, name = self._live().llm, f"score-{uuid4().hex}"
        lora = lora_request(adapter) if adapter else None
        prompt, params = prompt_input(tokens, tenant), scoring_params(k)
        outputs = llm.generate(prompt, params, name, lora_request=lora, priority=priority)
        with self._opened(name):
            async with aclosing(outputs):
                async for output in outputs:
                    if output.prompt_logprobs is None:
                        break
                    topk = topk_rows(output.prompt_logprobs, k) if k else None
                    return prompt_logprobs(tokens, output.prompt_logprobs), topk
        raise EngineUnavailable("the engine stopped before the sequence was scored")


def _engine_config(options: EngineOptions) -> VllmConfig:
    """Have vLLM check the options and the model's configuration. Raises EngineUnfit with vLLM's own reason."""
    try:
        return engine_args(options).create_engine_config()
    except ValueError as error:
        lines = [line.strip().partition(" [type=")[0] for line in str(error).splitlines() if line.strip()]
        # pydantic's first line counts the errors, its second says what the first one is.
        said = lines[1 if len(lines) > 1 and "validation error" in lines[0] else 0].removeprefix("Value error, ")
        raise EngineUnfit(f"vLLM cannot serve {options.model_path}: {said}") from error


def _make_llm(config: VllmConfig, model_path: Path) -> AsyncLLM:
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except Exception:
        with fit(model_path):
            check_tokenizer(model_path)  # What this raises says more.
        raise


def _check_served(left_out: Set[str]) -> None:
    """Refuse an adapter that vLLM would apply only in part, without these modules."""
    if left_out:
        message = f"vLLM serves no adapter on {len(left_out)} modules, such as {min(left_out)}"
        raise InvalidShape(message, field="adapter")


def _tap(llm: AsyncLLM, options: EngineOptions) -> TokenTap | None:
    if options.outputs == "stock":
        return None
    # Imported only here: in a vLLM with another output path, what this module imports may not exist.
    from sampler_service.engine.vllm.direct_output import TokenTap  # noqa: PLC0415

    return TokenTap.install(llm)


@asynccontextmanager
async def _generate(
    llm: AsyncLLM, request: GenerationRequest, params: VllmSamplingParams, tokens: Coalescer
) -> AsyncIterator[None]:
    """Start a request whose tokens go into the coalescer. Leaving early frees it before the engine's next step."""
    prompt = prompt_input(request.prompt, request.tenant)
    lora = lora_request(request.adapter) if request.adapter else None
    name, priority = request.request_id, request.priority
    outputs = llm.generate(prompt, params, name, lora_request=lora, priority=priority, reasoning_ended=True)

    async def pass_on() -> None:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    put_tokens(output, request.topk_logprobs, tokens)
        except Exception as error:  # raised by the reader instead
            tokens.close(error)
        else:
            tokens.close()

    passing = asyncio.create_task(pass_on())
    try:
        yield
    finally:
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)


def engine_args(options: EngineOptions) -> AsyncEngineArgs:
    """Map the options to vLLM's arguments. What vLLM decides better itself is left to its defaults."""
    rank = min((rank for rank in RANKS if rank >= options.max_lora_rank), default=options.max_lora_rank)
    args = AsyncEngineArgs(
        model=str(options.model_path),
        served_model_name=[options.model_name],
        # Some models have a renderer of vLLM's own, which writes other prompts than the template that they train with.
        tokenizer_mode="hf",
        dtype=_dtype(options),
        load_format="safetensors",
        max_model_len=options.max_model_len,  # type: ignore[arg-type] # None is vLLM's own default
        enable_lora=True,
        max_lora_rank=rank,  # type: ignore[arg-type]
        max_loras=options.max_active_versions,
        max_cpu_loras=options.max_cpu_versions,
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        enforce_eager=options.enforce_eager,
        max_num_active_seqs=options.max_num_seqs,
        max_num_seqs=options.max_num_seqs + num_at_once(options.max_num_seqs),
        scheduling_policy="priority",
        # Not vLLM's constant default, with which a restarted engine would sample the same completions again.
        seed=secrets.randbits(31),
        enable_prefix_caching=True,
        # vLLM's default fills what a request leaves out from the model's generation_config.json. Of that file only the
        # end-of-sequence tokens hold, which vLLM reads in any case.
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        # By default vLLM picks a backend that supports the first request, and then uses it for every request.
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
        max_logprobs=MAX_TOPK,
        enable_log_requests=False,
        disable_log_stats=True,
        worker_extension_cls="sampler_service.engine.vllm.worker.extension.WorkerExtension",
    )
    if options.base_dir is not None:
        args.load_format = LOAD_FORMAT
        args.model_loader_extra_config = extra_config(options)
        # With steps prepared ahead, tokens could be marked with a version that was written after they were computed.
        args.async_scheduling = False if options.in_place == "hogwild" else None
    if options.pipeline_parallel_size > 1:
        # With pipeline parallelism this model runner does not support asynchronous scheduling.
        args.async_scheduling = False
    if current_platform.is_cpu():
        _set_cpu_args(args, options)
    return args


def _dtype(options: EngineOptions) -> Dtype:
    """Return the dtype to compute in. For weights stored in float32, vLLM would choose bfloat16 on CPUs.

    It does so on GPUs too; that stands, because vLLM computes adapters there in 16 bits only.
    """
    if options.dtype == "auto" and current_platform.is_cpu() and stored_dtype(options.model_path) is torch.float32:
        return "float32"
    return options.dtype


def _set_cpu_args(args: AsyncEngineArgs, options: EngineOptions) -> None:
    args.kv_cache_memory_bytes = int(options.kv_cache_gib * 2**30)
    args.block_size = CPU_BLOCK_SIZE
    args.worker_cls = "sampler_service.engine.vllm.cpu.lora.GroupedLoraCpuWorker"
    alone = options.tensor_parallel_size * options.pipeline_parallel_size == 1
    if alone and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        # The worker needs its own process only to bind its threads to cores. Without one, starting takes half as long
        # and steps do not wait for messages.
        args.distributed_executor_backend = UniProcExecutor


@contextmanager
def _own_sockets() -> Iterator[OwnDirectory | None]:
    """Have vLLM put the sockets of an engine, which it leaves behind, into a directory that is removed with it.

    If the path of vLLM's directory for sockets is too long for another directory in it, yield None.
    """
    directory = OwnDirectory(Path(vllm.envs.VLLM_RPC_BASE_PATH), "paceline-vllm")
    if len(f"{directory.path}/{uuid4()}") > _LONGEST_SOCKET_PATH:
        directory.close()
        yield None
        return
    before = os.environ.get(SOCKETS_VARIABLE)
    os.environ[SOCKETS_VARIABLE] = str(directory.path)
    try:
        yield directory
    except BaseException:
        directory.close()
        raise
    finally:
        if before is None:
            del os.environ[SOCKETS_VARIABLE]
        else:
            os.environ[SOCKETS_VARIABLE] = before


def _shut_down(llm: AsyncLLM) -> None:
    """End vLLM's processes, close its sockets and tasks, and fail the calls that are still unanswered."""
    try:
        llm.shutdown()
    except psutil.NoSuchProcess:
        # vLLM kills an engine that takes more than 5 s to end, and fails if the engine ends by itself at that moment.
        # Do what it skipped.
        llm.engine_core.resources()
        llm.shutdown()
    # If its engine dies, vLLM ends requests, but leaves other calls waiting, such as loads of adapters.
    for answer in llm.engine_core.utility_results.values():
        if not answer.done():
            answer.set_exception(EngineDeadError())
            answer.exception()  # nobody may wait for it, which is no error to log


def prepare_environment() -> None:
    """Set options that vLLM reads only from the environment.

    No usage reports, processes by spawn, and grammars of tool calls.
    """
    if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") != "0":
        raise ValueError("VLLM_ALLOW_INSECURE_SERIALIZATION lets anyone who reaches vLLM's sockets run code; unset it")
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    os.environ["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "1"
    # vLLM has two model runners and uses the second if it finds Triton. The handling of adapters, seeds, filters and
    # log-probabilities here was tested with the first.
    os.environ.setdefault(RUNNER_VARIABLE, "0")
    if current_platform.is_cpu():
        # With adapters vLLM runs eagerly on CPUs. The few functions that it compiles anyway need a C++ compiler, which
        # a machine that only serves does not have.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


@contextmanager
def translated() -> Iterator[None]:
    """Raise vLLM's errors as ours: EngineUnavailable for a dead engine, InvalidArgument for a refused value."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineUnavailable("the engine died; it is restarting") from error
    except VLLMValidationError as error:
        field = error.parameter or ""
        raise InvalidArgument("vLLM refuses this value; see its documentation", field=field) from error

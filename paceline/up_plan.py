"""What `paceline up` starts: one plan per service, with its settings, its cores or its GPU."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from paceline.api_keys import ApiKey, dump_keys, hash_token, new_token
from paceline.machine import count_gpus


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `paceline up` can be told; see its help."""

    model: str
    model_name: str = ""
    state: str = ".paceline"
    address: str = "127.0.0.1:50050"
    engine: str = "vllm"
    bridge: str = "stream"
    dtype: str = "auto"
    max_lora_rank: int = 32
    log_level: str = "INFO"


@dataclass(frozen=True, slots=True)
class Plan:
    """How one service is started."""

    name: str
    module: str
    environment: Mapping[str, str]
    health: str
    """Address of its health service."""
    service: str
    """Full name of the gRPC service that must be ready."""
    cores: frozenset[int] = frozenset()
    """Cores that it may use; empty means all."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What of the machine a service gets."""

    cores: frozenset[int] = frozenset()
    environment: Mapping[str, str] | None = None


def read_or_make_key(state: Path) -> Path:
    """Return the file with the API key, made on first use together with the gateway's file of keys."""
    state.mkdir(parents=True, exist_ok=True)
    key_file = state / "api_key"
    if not key_file.exists():
        _write_secret(key_file, new_token())
    digest = hash_token(key_file.read_text().strip())
    _write_secret(state / "keys.json", dump_keys([ApiKey("up", "default", digest)]))
    if not (state / "credential").exists():
        _write_secret(state / "credential", secrets.token_urlsafe(32))
    return key_file


def make_plans(options: UpOptions, state: Path) -> list[Plan]:
    """Plan the services in the order in which they are started. Ports follow from the gateway's."""
    host, _, port = options.address.rpartition(":")
    listen = {name: f"{host}:{int(port) + offset}" for offset, name in enumerate(("gateway", "trainer", "sampler"))}
    health = {name: f"127.0.0.1:{int(port) + offset + 100}" for offset, name in enumerate(listen)}
    credential = str(state / "credential")
    is_shared = options.bridge == "shared"
    shares = _share_machine(one_gpu=is_shared)

    def plan(name: str, module: str, service: str, settings: Mapping[str, str]) -> Plan:
        common = {
            "listen": listen[name],
            "health_listen": health[name],
            "credential_file": credential,
            "log_level": options.log_level,
            "log_format": "console",
        }
        prefix = f"PACELINE_{name.upper()}_"
        variables = {prefix + key.upper(): value for key, value in {**common, **settings}.items()}
        environment = {**(shares[name].environment or {}), **variables}
        return Plan(name, module, environment, health[name], service, shares[name].cores)

    model = {
        "model": options.model,
        "model_name": options.model_name or Path(options.model).name,
        "dtype": options.dtype,
        "checkpoint_dir": str(state / "checkpoints"),
        "max_lora_rank": str(options.max_lora_rank),
    }
    sampler = {
        "trainer": listen["trainer"],
        "engine": options.engine,
        "bridge": options.bridge,
        "scratch_dir": str(state / "scratch"),
    }
    base = {"base_dir": str(_base_directory(options, state))} if is_shared else {}
    gateway = {"trainer": listen["trainer"], "samplers": listen["sampler"], "keys_file": str(state / "keys.json")}
    return [
        plan("trainer", "trainer_service", "paceline.trainer.v1.TrainerService", {**model, **base}),
        plan("sampler", "sampler_service", "paceline.sampler.v1.SamplerService", {**model, **sampler, **base}),
        plan("gateway", "gateway", "paceline.gateway.v1.GatewayService", gateway),
    ]


def _base_directory(options: UpOptions, state: Path) -> Path:
    """Return where the sampler lends its base weights, the same for a state directory each time."""
    if options.dtype == "auto":
        raise ValueError("--bridge shared takes --dtype float32 or bfloat16: both services use the same weights")
    return Path("/dev/shm") / f"paceline-base-{sha256(str(state.resolve()).encode()).hexdigest()[:16]}"  # noqa: S108


def _share_machine(*, one_gpu: bool) -> dict[str, _Share]:
    """Give trainer and sampler a GPU or cores of their own: two OpenMP pools on the same cores slow each other down.

    With `one_gpu` they share the first, as weights that both use lie there.
    """
    gpus = count_gpus()
    if gpus:
        second = {"CUDA_VISIBLE_DEVICES": "1"} if gpus > 1 and not one_gpu else _half_gpu()
        return {
            "trainer": _Share(environment={"CUDA_VISIBLE_DEVICES": "0"}),
            "sampler": _Share(environment=second),
            "gateway": _Share(),
        }
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return {
        "trainer": _cpu_share(cores[:half]),
        "sampler": _cpu_share(cores[half:] or cores),
        "gateway": _Share(),
    }


def _half_gpu() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": "0", "PACELINE_SAMPLER_GPU_MEMORY_UTILIZATION": "0.5"}


def _cpu_share(cores: list[int]) -> _Share:
    threads = str(len(cores))
    return _Share(
        frozenset(cores),
        {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # The cores are set on the process; told of cores, vLLM would start a worker process and bind that instead.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    )


def _write_secret(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)

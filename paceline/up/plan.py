"""Plan what `paceline up` starts: the state directory, and one plan per service with its settings, cores or GPUs.

Trainer and sampler get separate GPUs or cores, so that neither slows the other down.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from paceline.errors import InvalidArgument
from paceline.files.api_keys import ApiKey, made_now, new_token, update_keys
from paceline.files.folder_lock import FolderInUse, FolderLock
from paceline.files.regular_files import NotRegularFile
from paceline.files.secret_files import lock, read_secret, write_secret
from paceline.machine import visible_gpus


class CannotStart(Exception):
    """The services could not be started, or one was given up. The message is one sentence: why, and what to do."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `paceline up`; their metadata is its help."""

    model: str = field(metadata={"help": "base model: a local directory or a Hugging Face id"})
    model_name: str = field(default="", metadata={"help": "name that clients use; empty: the last part of --model"})
    state: str = field(default=".paceline", metadata={"help": "directory of checkpoints, logs and the API key"})
    address: str = field(default="127.0.0.1:50050", metadata={"help": "address of the gateway"})
    engine: str = field(default="vllm", metadata={"help": "engine of the sampler", "choices": ("vllm", "hf")})
    bridge: str = field(
        default="stream",
        metadata={
            "help": "how versions are sent to the sampler",
            "choices": ("stream", "volume", "collective", "restart", "shared"),
        },
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of both services; auto: float32 on CPUs, bfloat16 on GPUs",
            "choices": ("auto", "float32", "bfloat16"),
        },
    )
    max_lora_rank: int = field(default=64, metadata={"help": "largest rank of an adapter"})
    log_level: str = field(default="INFO", metadata={"help": "DEBUG, INFO, WARNING or ERROR"})


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
    stop_seconds: float
    """How long it may take to stop after SIGTERM: calls in progress finish and runs are saved."""
    cores: frozenset[int] = frozenset()
    """Cores that it may use; empty means all."""
    share: str = ""
    """The service's share of the machine, in words."""
    after: str = ""
    """The service that must have been ready before this one starts; empty: none."""


@dataclass(frozen=True, slots=True)
class Share:
    """One service's share of the machine."""

    name: str = ""
    """In words, such as "core 0"; empty means no particular share."""
    cores: frozenset[int] = frozenset()
    """Cores that it may use; empty means all."""
    environment: Mapping[str, str] = field(default_factory=dict)


_FLAGS = {"listen": "--address", "health_listen": "--address", "trainer": "--address", "samplers": "--address",
          "model": "--model", "model_name": "--model-name", "base_dir": "--bridge shared", "credential": "--state",
          "credential_file": "--state", "keys_file": "--state",
          "tenants_file": "--state", "insecure": "--state", "http_listen": "--address",
          "http_state": "--state"}  # fmt: skip
"""Settings by which the services find and trust each other, with the flag that determines each."""

_KEY_NAME = "up"
"""Name of the key of `paceline up` in the gateway's keys file."""
_DRAIN_SECONDS = 5
"""Short, because a user has pressed Ctrl-C and is waiting."""
_CLOSE_SECONDS = 20.0
"""How long a service may take after that: the trainer saves its runs and closes their journals."""


def read_or_make_key(state: Path) -> Path:
    """Return the path of the API key file, created on first use together with the gateway's keys file.

    Other keys in the keys file are kept. Raises CannotStart if `state` cannot be created, a file cannot be read or
    written, or a file holds no secret or no keys.
    """
    _make_state(state)
    key_file, keys_file = state / "api_key", state / "keys.json"
    own = made_now(_KEY_NAME, "default", _read_or_make(key_file, new_token))
    _read_or_make(state / "credential", lambda: secrets.token_urlsafe(32))

    def with_own(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        others = [key for key in keys if key.name != _KEY_NAME]
        unchanged = (key for key in keys if replace(key, created=own.created) == own)
        return next(unchanged, own), *others

    try:
        update_keys(keys_file, with_own)
    except InvalidArgument as error:
        raise CannotStart(f"{keys_file} is not a valid keys file ({error}); repair or remove it") from error
    return key_file


def _read_or_make(path: Path, make: Callable[[], str]) -> str:
    """Return the secret in a file, made on first use. Raises CannotStart."""
    try:
        with lock(path):
            if not path.exists():
                write_secret(path, make().encode())
            return read_secret(path)
    except OSError as error:
        raise CannotStart(f"{error.filename} cannot be written ({error.strerror}); free space for it") from error
    except ValueError as error:
        raise CannotStart(f"{error}; remove it, and the next start makes a new one") from error


def _make_state(state: Path) -> None:
    """Create the directory if it does not exist. Raises CannotStart."""
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"--state {state} cannot be created ({error.strerror}); choose another directory") from error


@contextmanager
def locked_state(state: Path) -> Iterator[None]:
    """Hold the directory's lock while the block runs; create the directory if it does not exist.

    The lock is released however the process ends. Raises CannotStart if the directory cannot be created or another
    process holds it.
    """
    _make_state(state)
    try:
        lock = FolderLock(state)
    except FolderInUse as error:
        raise CannotStart(
            f"--state {state} is used by another `paceline up` ({error}); stop that one, or choose another directory"
        ) from None
    except NotRegularFile as error:
        raise CannotStart(f"--state {state}: {error}") from error
    except OSError as error:
        raise CannotStart(f"{error.filename} cannot be locked ({error.strerror}); choose another directory") from error
    with closing(lock):
        yield


def make_plans(options: UpOptions, state: Path, given: Mapping[str, str] | None = None) -> list[Plan]:
    """Plan the services in the order in which they are started. All ports are derived from the gateway's.

    Variables PACELINE_<SERVICE>_* in `given` are passed to their services and override the plan; without `given` there
    are none. Raises CannotStart for an address that leaves too few ports, for variables that only this function
    may set, and if there are fewer GPUs than required.
    """
    given = without_settings(os.environ) if given is None else given
    _refuse_own_variables(given)
    addresses = _addresses(options.address)
    listen, health = addresses["listen"], addresses["health"]
    is_shared = options.bridge == "shared"
    gpus = visible_gpus(given)
    shares = _share_machine(gpus, given, together=is_shared)

    # While vLLM starts, it takes what other processes allocate on its GPU for its own, and has less for its KV cache.
    # With the bridge shared, the trainer waits for the sampler's weights anyway.
    after = {"trainer": "sampler"} if len(gpus) == 1 and options.engine == "vllm" and not is_shared else {}

    def plan(name: str, module: str, service: str, settings: Mapping[str, str]) -> Plan:
        common = {
            "listen": listen[name],
            "health_listen": health[name],
            "credential_file": str(state / "credential"),
            "log_level": options.log_level,
            "log_format": "console",
            "drain_seconds": str(_DRAIN_SECONDS),
        }
        prefix = f"PACELINE_{name.upper()}_"
        share = shares[name]
        variables = {prefix + key.upper(): value for key, value in {**common, **settings}.items()}
        chosen = {key: value for key, value in given.items() if key.startswith(prefix)}
        environment = {**share.environment, **variables, **chosen}
        stop = stop_seconds(name, given)
        return Plan(
            name, module, environment, health[name], service, stop, share.cores, share.name, after.get(name, "")
        )

    # The shell leaves the tilde of --model=~/model as it is.
    path = str(Path(options.model).expanduser()) if options.model.startswith("~") else options.model
    model = {
        "model": path,
        "model_name": options.model_name or Path(path).name,
        "dtype": _dtype(options.dtype, gpus),
        "checkpoint_dir": str(state / "checkpoints"),
        "scratch_dir": str(state / "scratch"),
        "max_lora_rank": str(options.max_lora_rank),
    }
    sampler = {"trainer": listen["trainer"], "engine": options.engine, "bridge": options.bridge}
    base = {"base_dir": str(_base_directory(state))} if is_shared else {}
    gateway = {
        "trainer": listen["trainer"],
        "samplers": listen["sampler"],
        "keys_file": str(state / "keys.json"),
        "tenants_file": str(state / "tenants.json"),
        "http_listen": listen["http"],
        "http_state": str(state / "http"),
        "http_tokenizer": path,
    }
    return [
        plan("trainer", "trainer_service", "paceline.trainer.v1.TrainerService", {**model, **base}),
        plan("sampler", "sampler_service", "paceline.sampler.v1.SamplerService", {**model, **sampler, **base}),
        plan("gateway", "gateway", "paceline.gateway.v1.GatewayService", gateway),
    ]


def stop_seconds(name: str, given: Mapping[str, str]) -> float:
    """Return how long a service may take to stop; an invalid `drain_seconds` is refused by the service's settings."""
    try:
        drain = float(given.get(f"PACELINE_{name.upper()}_DRAIN_SECONDS", _DRAIN_SECONDS))
    except ValueError:
        drain = _DRAIN_SECONDS
    return drain + _CLOSE_SECONDS


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Paceline's variables, which each service gets from its plan."""
    return {name: value for name, value in environment.items() if not name.startswith("PACELINE_")}


def _refuse_own_variables(given: Mapping[str, str]) -> None:
    for service in ("TRAINER", "SAMPLER", "GATEWAY"):
        for setting, flag in _FLAGS.items():
            if (name := f"PACELINE_{service}_{setting.upper()}") in given:
                raise CannotStart(
                    f"`paceline up` sets {name} itself, following {flag}; unset the variable, or start the services "
                    "by hand"
                )


def _addresses(address: str) -> Mapping[str, Mapping[str, str]]:
    host, _, port = address.rpartition(":")
    names = ("gateway", "trainer", "sampler", "http")
    highest = 65535 - 100 - len(names) + 1
    if not host or not port.isdecimal() or not 0 < int(port) <= highest:
        raise CannotStart(f"--address {address}: write host:port, with a port from 1 to {highest}")
    return {
        "listen": {name: f"{host}:{int(port) + offset}" for offset, name in enumerate(names)},
        "health": {name: f"127.0.0.1:{int(port) + offset + 100}" for offset, name in enumerate(names)},
    }


def _dtype(asked: str, gpus: Sequence[str]) -> str:
    """Return the dtype of both services: with different dtypes, log-probabilities differ by 4e-2."""
    if asked != "auto":
        return asked
    return "bfloat16" if gpus else "float32"


def _base_directory(state: Path) -> Path:
    """Return the directory in which the sampler lends its base weights, always the same for a state directory."""
    return Path("/dev/shm") / f"paceline-base-{sha256(str(state.resolve()).encode()).hexdigest()[:16]}"  # noqa: S108


def _share_machine(gpus: Sequence[str], given: Mapping[str, str], *, together: bool) -> dict[str, Share]:
    if gpus:
        ranks = _count(given, "PACELINE_TRAINER_RANKS")
        parallel = _count(given, "PACELINE_SAMPLER_TENSOR_PARALLEL_SIZE")
        parallel *= _count(given, "PACELINE_SAMPLER_PIPELINE_PARALLEL_SIZE")
        trainer, sampler = share_gpus(gpus, ranks, parallel, together=together)
    else:
        trainer, sampler = share_cores(sorted(os.sched_getaffinity(0)))
    return {"trainer": trainer, "sampler": sampler, "gateway": Share()}


def share_gpus(gpus: Sequence[str], trainer: int, sampler: int, *, together: bool) -> tuple[Share, Share]:
    """Give the first `trainer` GPUs to the trainer and the next `sampler` GPUs to the sampler.

    They share a single GPU, with half of its memory for the sampler. With `together` they share the first GPU, because
    it holds the weights that both use. Raises CannotStart if there are too few GPUs.
    """
    if together or (len(gpus) == 1 and trainer == sampler == 1):
        first = {"CUDA_VISIBLE_DEVICES": gpus[0]}
        half = {**first, "PACELINE_SAMPLER_GPU_MEMORY_UTILIZATION": "0.5"}
        return Share(f"GPU {gpus[0]}", environment=first), Share(f"half of GPU {gpus[0]}", environment=half)
    if trainer + sampler > len(gpus):
        raise CannotStart(
            f"PACELINE_TRAINER_RANKS requires {trainer} GPUs and the sampler's parallel sizes {sampler}, "
            f"but there are {len(gpus)}: {', '.join(gpus)}"
        )
    return _gpu_share(gpus[:trainer]), _gpu_share(gpus[trainer : trainer + sampler])


def _gpu_share(gpus: Sequence[str]) -> Share:
    names = ", ".join(gpus)
    return Share(f"GPU {names}", environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus)})


def share_cores(cores: Sequence[int]) -> tuple[Share, Share]:
    """Give each half of the cores, because two OpenMP pools on the same cores stall each other; share a single core."""
    half = max(1, len(cores) // 2)
    return _core_share(cores[:half]), _core_share(cores[half:] or cores)


def _core_share(cores: Sequence[int]) -> Share:
    threads = str(len(cores))
    names = f"core {cores[0]}" if len(cores) == 1 else f"{len(cores)} cores from {cores[0]} to {cores[-1]}"
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # The process's affinity is set directly; given cores, vLLM would start a worker process and bind that instead.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return Share(names, frozenset(cores), variables)


def _count(given: Mapping[str, str], name: str) -> int:
    """Parse a number of GPUs; invalid values count as 1 here, and the service's settings refuse them."""
    text = given.get(name, "1")
    return int(text) if text.isdecimal() and int(text) > 0 else 1

"""Checks before anything is started: settings, ports, the model. Each raises CannotStart with one sentence."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from paceline.base_model.base_weights import weights_files
from paceline.errors import PacelineError
from paceline.extras import needing
from paceline.services import import_service_module
from paceline.settings import ServiceSettings, check_environment, settings_of
from paceline.up.plan import CannotStart, Plan
from paceline.weights import read_header

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A model has at least one of these files."""


def read_settings(plans: Sequence[Plan], given: Mapping[str, str]) -> list[ServiceSettings]:
    """Read each service's settings as the service would; `given` is this process's environment."""
    ours = {name: value for name, value in given.items() if name.startswith("PACELINE_")}
    return [_read(plan, {**ours, **plan.environment}) for plan in plans]


def _read(plan: Plan, environment: Mapping[str, str]) -> ServiceSettings:
    cls = _settings_class(plan)
    try:
        check_environment(cls, environment)
        return settings_of(cls, environment)
    except SystemExit as refused:
        raise CannotStart(f"{plan.name}: {'; '.join(str(refused).splitlines())}") from None


def _settings_class(plan: Plan) -> type[ServiceSettings]:
    # By name, because this package must not import a service.
    module = import_service_module(f"{plan.module}.settings")
    cls: type[ServiceSettings] = getattr(module, f"{plan.name.capitalize()}Settings")
    return cls


def check_packages(engine: str) -> None:
    """Check that the packages are installed that the services import once they run. Raises MissingExtra."""
    for name in ("torch", "transformers", "peft", "fastapi"):
        with needing("up", "`paceline up`"):
            _find(name)
    with needing("up", "`paceline up`, unless it is told --engine hf,"):
        _find("vllm" if engine == "vllm" else "torch")


def _find(name: str) -> None:
    if find_spec(name) is None:
        raise ModuleNotFoundError(name=name)


def check_ports(settings: Sequence[ServiceSettings]) -> None:
    """Check that the services' addresses are free."""
    for service in settings:
        addresses = (service.listen, service.health_listen, service.metrics_listen, getattr(service, "http_listen", ""))
        for address in addresses:
            if address:
                _check_port(address)


def _check_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _name, target in found:
            with socket.socket(family, kind, protocol) as probe:
                # As the services do: a port whose last connections are still closing counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotStart(
                f"another process listens on {address}; stop it, or choose other ports with --address"
            ) from None
        raise CannotStart(f"cannot listen on {address}: {error.strerror}; choose another --address") from None


def check_model(model: str) -> None:
    """Check that the model exists: a directory with configuration, weights and tokenizer, or a Hugging Face id."""
    path = Path(model).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise CannotStart(f"--model {model}: {path.resolve()} has no config.json; name a directory of a model")
        _check_weights(model, path)
        if not any((path / name).is_file() for name in _TOKENIZERS):
            raise CannotStart(f"--model {model}: {path.resolve()} has no tokenizer ({' or '.join(_TOKENIZERS)})")
        return
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise CannotStart(f"--model {model}: there is no directory {path.resolve()}")
    _check_hub(model)


def _check_weights(model: str, path: Path) -> None:
    """Check that a model's weight files exist and are complete according to their headers."""
    try:
        files = weights_files(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotStart(f"--model {model}: the index of its weights cannot be read ({error!r})") from None
    if not files:
        raise CannotStart(f"--model {model}: {path.resolve()} has no *.safetensors files, from which weights are read")
    for file in files:
        if not file.is_file():
            raise CannotStart(f"--model {model}: {file.resolve()} is missing, but the index of its weights names it")
        if not _is_complete(file):
            raise CannotStart(
                f"--model {model}: {file.resolve()} is not a complete safetensors file; download or copy it again"
            )


def _is_complete(file: Path) -> bool:
    """Return whether a safetensors file has a header and all the bytes that the header declares."""
    try:
        header = read_header(file.resolve())  # the hub's cache links to its files
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (OSError, PacelineError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return 8 + len(header) + end == file.stat().st_size


def _check_hub(model: str) -> None:
    # The library that the services load models with.
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    try:
        hf_hub_download(model, "config.json")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
        raise CannotStart(
            f"--model {model}: there is no such directory, and the Hugging Face hub gives no such model ({reason})"
        ) from None

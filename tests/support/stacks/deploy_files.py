"""Reads the files of `deploy/` as the deployment tools do, and the settings that they give each service."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from paceline.settings import ServiceSettings, check_environment
from sampler_service.settings import SamplerSettings
from trainer_service.settings import TrainerSettings

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "trainer": TrainerSettings,
    "sampler": SamplerSettings,
}
SERVICES = tuple(SETTINGS)
GRPC_SERVICES = {name: f"paceline.{name}.v1.{name.capitalize()}Service" for name in SERVICES}
USER = 10001


def make_secrets(directory: Path) -> dict[str, str]:
    """Make the secrets of a deployment as `make proto` does; return the text of each file by its path."""
    subprocess.run([sys.executable, ROOT / "scripts" / "make_secrets.py", directory], check=True, capture_output=True)
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


@dataclass(frozen=True, slots=True)
class Container:
    """One service as a deployment runs it."""

    service: str
    environment: dict[str, str]
    """The image's variables, overridden by those of the deployment."""
    spec: dict[str, Any]
    """Its specification in compose or Kubernetes."""


def load(path: Path) -> Any:
    """Return the only document of a YAML file."""
    return yaml.safe_load(path.read_text())


def port(address: str) -> int:
    """Return the port of host:port."""
    return int(address.rpartition(":")[2])


def default_port(service: str, field: str) -> int:
    """Return the port in a service's default settings."""
    return port(SETTINGS[service].model_fields[field].default)


def instructions(service: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions in order: name, arguments."""
    text = (DEPLOY / "docker" / f"{service}.Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line)]


def image_environment(service: str) -> dict[str, str]:
    """Return the variables that a Dockerfile sets."""
    pairs = [part for name, rest in instructions(service) if name == "ENV" for part in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def compose_services(file: str) -> dict[str, dict[str, Any]]:
    """Return a compose file's services, merged with what they extend."""
    return {name: _extended(spec) for name, spec in load(ROOT / file)["services"].items()}


def compose_container(file: str, service: str) -> Container:
    """Return a service of a compose file."""
    spec = compose_services(file)[service]
    given = {name: _substituted(value) for name, value in spec["environment"].items() if value is not None}
    return Container(service, image_environment(service) | given, spec)


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` sends, generated config maps included."""
    kustomization = load(folder / "kustomization.yaml")
    found: list[dict[str, Any]] = []
    for resource in kustomization["resources"]:
        target = folder / resource
        found += kustomized(target) if target.is_dir() else list(yaml.safe_load_all(target.read_text()))
    for generator in kustomization.get("configMapGenerator", []):
        data = dict(literal.split("=", 1) for literal in generator["literals"])
        metadata = {"name": generator["name"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return found


def kubernetes_container(service: str) -> Container:
    """Return the only container of a service's pods; its `spec` is the pod's."""
    objects = kustomized(DEPLOY / "k8s" / service)
    (pod,) = [item["spec"]["template"]["spec"] for item in objects if item["kind"] in {"Deployment", "StatefulSet"}]
    (container,) = pod["containers"]
    (source,) = container["envFrom"]
    name = source["configMapRef"]["name"]
    (given,) = [item["data"] for item in objects if item["kind"] == "ConfigMap" and item["metadata"]["name"] == name]
    return Container(service, image_environment(service) | given, pod)


def settings_of(container: Container, monkeypatch: pytest.MonkeyPatch, credential: Path) -> Any:
    """Return the settings that the service would read, with `credential` as the mounted file."""
    prefix = f"PACELINE_{container.service.upper()}_"
    environment = container.environment | {f"{prefix}CREDENTIAL_FILE": str(credential)}
    check_environment(SETTINGS[container.service], environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return SETTINGS[container.service]()


def _extended(spec: dict[str, Any]) -> dict[str, Any]:
    if "extends" not in spec:
        return spec
    base = load(ROOT / spec["extends"]["file"])["services"][spec["extends"]["service"]]
    return _merged(base, {key: value for key, value in spec.items() if key != "extends"})


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        elif isinstance(value, list) and isinstance(result.get(key), list):
            result[key] = [*result[key], *value]
        else:
            result[key] = value
    return result


def _substituted(value: object) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))

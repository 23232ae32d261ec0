"""Collect wheels for `make test-gpu` on an offline GPU machine that already has torch with its CUDA packages.

    python scripts/wheels_gpu.py [DIRECTORY]

They are the packages of the GPU images (requirements/gpu.txt), and those that make stubs and run tests: what
pyproject.toml names and what the packages installed here require, in the versions of requirements/*.txt. torch and its
CUDA packages are left out.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("trainer", "gateway", "jwt", "sampler-hf")
IMAGE = "gpu.txt"
"""The pins of the GPU images, including vLLM."""
TOOLS = (
    "editables",
    "grpcio-tools",
    "hatchling",
    "hypothesis",
    "mypy-protobuf",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
)
"""Packages that make stubs and run tests."""
FOR_TRL = ("dill", "jinja2", "python-dateutil")
"""What only the packages in requirements/bench.txt need."""
PRESENT = ("torch", "setuptools", "triton", "nvidia-", "cuda-")
"""Name prefixes of the packages present with torch, and of torchvision and torchaudio, which vLLM does not use here."""
MACHINE = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "os_name": "posix",
}
PLATFORMS = ("manylinux2014_x86_64", "manylinux1_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)))
"""pip accepts a wheel only for a platform that is named."""


def read_pins(*names: str) -> dict[str, str]:
    """Read name -> version from files in requirements/."""
    lines = [line for name in names for line in (ROOT / "requirements" / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def pins() -> dict[str, str]:
    """Return the versions to collect; the images' pins take precedence."""
    return read_pins("cpu.txt", "dev.txt") | read_pins(IMAGE)


def is_present(name: str) -> bool:
    """Return whether a package is present with torch."""
    return name.startswith(PRESENT)


def needed() -> set[str]:
    """Return the names of all packages needed there, except those in requirements/bench.txt."""
    image = {name for name in read_pins(IMAGE) if not is_present(name)}
    return image | required(*EXTRAS, tools=(*TOOLS, *FOR_TRL))


def required(*extras: str, tools: Iterable[str] = ()) -> set[str]:
    """Return the names of what the project's given extras, and these tools, require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    roots = [*project["dependencies"], *known["server"], *tools, *(need for extra in extras for need in known[extra])]
    found: dict[str, set[str]] = {}
    _follow((root for root in roots if not root.startswith(project["name"])), found)
    return set(found)


def required_by(package: str) -> set[str]:
    """Return the names of what a package installed here requires."""
    found: dict[str, set[str]] = {}
    _follow(_required(package, set()), found)
    return set(found)


def _follow(needs: Iterable[str], found: dict[str, set[str]]) -> None:
    for need in map(Requirement, needs):
        name = canonicalize_name(need.name)
        if is_present(name) or (name in found and need.extras <= found[name]):
            continue
        found[name] = found.get(name, set()) | need.extras
        _follow(_required(name, found[name]), found)


def _required(name: str, extras: set[str]) -> Iterator[str]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        # A CPU installation leaves out what no service imports; for the images a resolver has followed it (gpu.txt).
        return
    for line in lines:
        marker = Requirement(line).marker
        if marker is None or any(marker.evaluate(MACHINE | {"extra": extra}) for extra in {"", *extras}):
            yield line


def write_requirements(directory: Path) -> Path:
    """Write the pins of the needed packages; return the file."""
    directory.mkdir(parents=True, exist_ok=True)
    versions, path = pins(), directory / "requirements.txt"
    path.write_text("".join(f"{name}=={versions[name]}\n" for name in sorted(needed())))
    return path


def download(directory: Path) -> None:
    """Download the wheels."""
    chosen = ["-r", str(write_requirements(directory)), "-r", str(ROOT / "requirements" / "bench.txt")]
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    target = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:", *platforms]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, *target, "--dest", str(directory), *chosen], check=True)
    wheels = list(directory.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 2**20:.0f} MiB in {directory}")


if __name__ == "__main__":
    download(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "wheels")

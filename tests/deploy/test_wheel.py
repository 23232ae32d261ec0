"""What a wheel puts into a user's environment: the package paceline, and the services' programs inside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from support.stacks.deploy_files import ROOT

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
OF_THE_CLIENT = (
    *("google", "google_crc32c", "grpc", "grpc_status", "numpy", "numpy.libs", "typing_extensions.py"),
    *("rich", "pygments", "markdown_it", "mdurl", "typer", "click", "shellingham", "annotated_doc"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
)
"""What the client's dependencies install."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel's files."""
    folder = tmp_path_factory.mktemp("wheel")
    for file in WheelBuilder(str(ROOT)).recurse_included_files():
        target = folder / file.distribution_path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.path, target)
    return folder


@pytest.fixture(scope="module")
def client_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages that the client requires, and no others."""
    folder = tmp_path_factory.mktemp("packages")
    for name in OF_THE_CLIENT:
        if (SITE_PACKAGES / name).exists():
            (folder / name).symlink_to(SITE_PACKAGES / name)
    return folder


def run(*words: str, among: tuple[Path, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of these folders and no others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE_"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, among))
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)


def test_a_wheel_has_one_top_level_name(wheel: Path) -> None:
    assert [path.name for path in wheel.iterdir()] == ["paceline"]


def test_the_client_needs_no_other_package_than_its_requirements(
    wheel: Path, client_packages: Path, tmp_path: Path
) -> None:
    done = run("-c", "import paceline; paceline.ServiceClient", among=(wheel, client_packages), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", ["gateway", "trainer_service", "sampler_service"])
def test_a_service_runs_from_the_wheel(service: str, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "gateway").mkdir()  # what lies in the current folder does not take a service's place
    (tmp_path / "gateway" / "__init__.py").write_text("raise SystemExit('not ours')")
    done = run("-m", "paceline.services", service, "--help", among=(wheel, SITE_PACKAGES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m paceline.services {service}")


def test_processes_of_a_service_can_import_it(wheel: Path, tmp_path: Path) -> None:
    started = (
        "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import trainer_service'], check=True)"
    )
    code = f"from paceline.services import make_importable; make_importable(); {started}"
    assert run("-c", code, among=(wheel, SITE_PACKAGES), cwd=tmp_path).returncode == 0


def test_a_tool_of_a_service_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    words = ("trainer_service.import_adapter", "--help")
    done = run("-m", "paceline.services", *words, among=(wheel, SITE_PACKAGES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_keys_are_made_without_the_packages_of_a_service(wheel: Path, client_packages: Path, tmp_path: Path) -> None:
    words = ("keys", "add", "laptop", "--tenant", "team-a", "--file", "keys.json")
    done = run("-m", "paceline.cli", *words, among=(wheel, client_packages), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "keys.json").exists()


@pytest.mark.parametrize("module", ["gatewy", "gateway.proxy", ""])
def test_what_is_no_program_is_refused_with_the_services_names(module: str, wheel: Path, tmp_path: Path) -> None:
    done = run("-m", "paceline.services", module, among=(wheel, SITE_PACKAGES), cwd=tmp_path)
    assert done.returncode == 1
    assert "gateway, trainer_service, sampler_service" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("-m", "paceline.cli", "up", "--model=tiny"), "up"),
        (("-m", "paceline.services", "gateway"), "gateway"),
        (("-m", "paceline.services", "trainer_service"), "trainer"),
        (("-m", "paceline.services", "sampler_service"), "sampler"),
    ],
)
def test_what_lacks_an_extra_names_it(
    words: tuple[str, ...], extra: str, wheel: Path, client_packages: Path, tmp_path: Path
) -> None:
    done = run(*words, among=(wheel, client_packages), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"pip install 'paceline[{extra}]'")
    assert done.stderr.count("\n") == 1, done.stderr


def test_up_names_what_is_missing_before_it_starts_anything(wheel: Path, client_packages: Path, tmp_path: Path) -> None:
    for name in ("pydantic_settings", "dotenv", "grpc_health", "structlog"):
        (tmp_path / name).symlink_to(SITE_PACKAGES / name)
    model = tmp_path / "model"
    done = run("-m", "paceline.cli", "up", f"--model={model}", among=(wheel, client_packages, tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'paceline[up]'" in done.stderr.splitlines()[-1]
    assert "torch" in done.stderr

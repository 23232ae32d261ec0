"""README.md's lines that install, run as they are printed in empty environments. They take packages from an index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from support.models.tiny_models import make_tiny_llama
from support.ports import free_service_ports
from support.stacks.deploy_files import ROOT

pytestmark = [pytest.mark.install, pytest.mark.timeout(1800)]

_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def lines_of(heading: str) -> list[list[str]]:
    """Return the commands of pip in each block of a section of README.md, without its subsections."""
    section = re.split(rf"^#+ {heading}\n", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1]
    own = re.split(r"^#", section, flags=re.MULTILINE)[0]
    blocks = [[line.removeprefix("$ ") for line in block.splitlines()] for block in _BLOCK.findall(own)]
    assert all(line.startswith("pip ") for block in blocks for line in block)
    return blocks


class EmptyEnvironment:
    """A virtual environment, with a copy of the checkout as the current folder."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if (source := ROOT / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, self.checkout / name)
        venv.create(folder / "environment", with_pip=True)
        self.bin = folder / "environment" / "bin"
        self._folder = folder
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE_"))}
        self.variables = {**own, "PATH": path}

    def install(self, lines: list[str]) -> None:
        for line in lines:
            subprocess.run(line, shell=True, cwd=self.checkout, env=self.variables, check=True)

    def run(self, *command: str) -> str:
        """Run a command outside the checkout; return its output."""
        return subprocess.run(
            command, cwd=self._folder, env=self.variables, check=True, stdout=subprocess.PIPE, text=True
        ).stdout


@pytest.fixture
def empty(tmp_path: Path) -> EmptyEnvironment:
    return EmptyEnvironment(tmp_path)


CLIENT = "import sys, paceline; print(paceline.__file__, *{'torch', 'transformers', 'structlog'} & set(sys.modules))"


@pytest.mark.parametrize("heading", ["Install", "From another machine"])
def test_the_client_is_installed_alone(heading: str, empty: EmptyEnvironment) -> None:
    (lines,) = lines_of(heading)
    empty.install(lines)
    where, *heavy = empty.run("python", "-c", CLIENT).split()
    assert Path(where).is_relative_to(empty.bin.parent)
    assert not heavy
    assert not {"torch", "transformers", "structlog"} & set(empty.run("pip", "list", "--format=freeze").split("=="))


def test_an_index_has_what_the_extra_up_requires(empty: EmptyEnvironment) -> None:
    (line,) = lines_of("Everything on one machine")[0]
    empty.install([f"{line} --dry-run --quiet"])  # the packages for GPUs take 9 GB


def test_the_tokenizer_takes_the_transformers_of_a_year_ago(empty: EmptyEnvironment) -> None:
    empty.install(['pip install ".[examples]" transformers==5.5.4'])
    empty.run("python", "-c", "import paceline; from transformers import AutoTokenizer")


def test_a_machine_without_a_gpu_runs_everything(empty: EmptyEnvironment, tmp_path: Path) -> None:
    empty.install(lines_of("Everything on one machine")[1])
    model = make_tiny_llama(tmp_path / "model")
    address = f"127.0.0.1:{free_service_ports()}"
    code = f"""
import paceline
from pathlib import Path
from paceline.up.local import local_services
from paceline.up.plan import UpOptions
with local_services(UpOptions({str(model)!r}, address={address!r}), Path("log")) as services:
    with paceline.ServiceClient(services.address, services.api_key) as service:
        training = service.create_lora_training_client(rank=4)
        training.forward_backward([paceline.Datum.from_completion([1, 2], [3])]).result()
        training.optim_step().result()
        sampling = training.save_weights_and_get_sampling_client()
        reply = sampling.sample([1, 2], sampling_params=paceline.SamplingParams(max_tokens=2)).result()
        print(reply.model.version)
"""
    assert empty.run("python", "-c", code).strip() == "1"

"""The wheel's types for type checkers: a user's program sees the types of the client, not Any."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[3]
DEPENDENCIES = ("numpy", "google", "grpc", "google-stubs", "grpc-stubs")

PROGRAM = """
from typing import reveal_type

import paceline

client = paceline.ServiceClient()
training = client.create_lora_training_client(rank=16, target_modules=["q_proj"])
reveal_type(training)
datum = paceline.Datum([1, 2], {"target_tokens": [2, 3]})
reveal_type(datum.loss_fn_inputs)
passed = training.forward_backward([datum, paceline.Datum.from_completion([1], [2], advantages=1.0)], "ppo")
reveal_type(passed)
reveal_type(passed.result().metrics)
reveal_type(training.optim_step(paceline.AdamParams()).result().step)
sampling = training.save_weights_and_get_sampling_client()
reveal_type(sampling)
reveal_type(sampling.sample([1], sampling_params=paceline.SamplingParams(stop="END")).result().sequences[0].tokens)
reveal_type(client.list_runs())


async def main() -> None:
    reveal_type(await training.forward_backward([datum]))
    reveal_type(await client.get_server_capabilities_async())
    async for delta in sampling.sample_stream([1]):
        reveal_type(delta.tokens)
    try:
        await training.save_state("a")
    except paceline.errors.CheckpointExists as error:
        reveal_type(error.metadata)


training.optim_step(learning_rate=1.0)
"""

REVEALED = """
paceline.client.training_client.TrainingClient
dict[str, numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]]
paceline.client.futures.PacelineFuture[paceline.types.training.ForwardBackwardOutput]
dict[str, float]
int
paceline.client.sampling_client.SamplingClient
numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]
list[paceline.types.resources.Run]
paceline.types.training.ForwardBackwardOutput
paceline.client.results.ServerCapabilities
list[int]
dict[str, str]
"""


def test_a_strict_type_checker_sees_the_types_of_the_installed_client(tmp_path):
    environment, program = tmp_path / "environment", tmp_path / "program.py"
    venv.create(environment)
    packages = next(environment.glob("lib/python*/site-packages"))
    install_client(packages)
    here = Path(sysconfig.get_paths()["purelib"])
    for name in DEPENDENCIES:
        (packages / name).symlink_to(here / name)
    program.write_text(PROGRAM)
    arguments = ["--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    python = ["--python-executable", str(environment / "bin" / "python")]
    found = subprocess.run(  # noqa: PLW1510 - it is expected to report mistakes
        [sys.executable, "-m", "mypy", *arguments, *python, str(program)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}},
        capture_output=True,
        text=True,
    )
    revealed = [line.split('"')[1] for line in found.stdout.splitlines() if "Revealed type" in line]
    assert revealed == REVEALED.split("\n")[1:-1], found.stdout + found.stderr
    mistakes = [line for line in found.stdout.splitlines() if ": error:" in line]
    assert len(mistakes) == 1, found.stdout
    assert 'Unexpected keyword argument "learning_rate"' in mistakes[0]


def install_client(packages):
    """Copy the wheel's files of the client, including the generated stubs, into a folder."""
    for file in WheelBuilder(str(ROOT)).recurse_included_files():
        if file.distribution_path.startswith("paceline/"):
            target = packages / file.distribution_path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.path, target)

"""What `make` does: `up` ends without a complaint, an unchanged `proto` is silent, `clean` names what stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import gen_protos
import pytest
from support.stacks.deploy_files import ROOT

PACELINE = """#!/usr/bin/env python3
# Ends without an error after Ctrl-C, as `paceline up` does, which needs a while to stop its services. make complains
# if its child ends while make itself handles the signal.
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("up", flush=True)
signal.sigwait({signal.SIGINT})
time.sleep(1.0)
"""
CREATED = (".venv", "wheels", "paceline/trainer/v1", "gateway/__pycache__")
KEPT = ("deploy/secrets/keys", "results", "cache/paceline/models")


def outside_make() -> dict[str, str]:
    """Return the environment without what makes make take itself for a part of `make test`, and name its directory."""
    return {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}


def test_ctrl_c_ends_make_up_without_a_complaint(tmp_path: Path) -> None:
    for name, program in (("paceline", PACELINE), ("python", "#!/bin/sh\n")):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    command = ["make", "--old-file=proto", "up", f"RUN={tmp_path}"]
    pipe = subprocess.PIPE
    # A terminal sends SIGINT to the whole foreground group, and to nothing else.
    with subprocess.Popen(
        command, cwd=ROOT, env=outside_make(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as make:
        assert make.stdout is not None
        assert make.stdout.readline() == "up\n"
        os.killpg(make.pid, signal.SIGINT)
        assert make.communicate()[1] == ""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree of the contracts and their stubs."""
    tree = tmp_path_factory.mktemp("stubs")
    shutil.copytree(ROOT / "proto", tree / "proto")
    assert not gen_protos.is_current(tree)
    gen_protos.generate(tree)
    return tree


@pytest.fixture
def generated(fresh: Path, tmp_path: Path) -> Path:
    """Return a copy of the tree, to change."""
    return shutil.copytree(fresh, tmp_path / "stubs")


def test_stubs_are_current_whatever_the_times_of_the_files(generated: Path) -> None:
    (generated / "proto" / "paceline" / "types" / "v1" / "model.proto").touch()
    assert gen_protos.is_current(generated)


@pytest.mark.parametrize("file", ["proto/paceline/types/v1/model.proto", "paceline/types/v1/model_pb2.py"])
@pytest.mark.parametrize("is_removed", [False, True])
def test_stubs_are_not_current_after_a_change(generated: Path, file: str, is_removed: bool) -> None:
    path = generated / file
    if is_removed:
        path.unlink()
    else:
        path.write_text(path.read_text() + "\n")
    assert not gen_protos.is_current(generated)


@pytest.mark.parametrize("package", ["grpcio-tools", "mypy-protobuf"])
def test_stubs_of_another_generator_are_not_current(
    generated: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = gen_protos.version
    monkeypatch.setattr(gen_protos, "version", lambda name: "0" if name == package else version(name))
    assert not gen_protos.is_current(generated)


def clean(directory: Path) -> str:
    environment = outside_make() | {"XDG_CACHE_HOME": str(directory / "cache")}
    done = subprocess.run(
        ["make", "clean"], cwd=directory, env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


def test_cleaning_leaves_secrets_results_and_the_cached_model_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "scripts" / "clean.sh", tmp_path / "scripts")
    for name in (*CREATED, *KEPT):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    said = clean(tmp_path)
    assert [name for name in CREATED if (tmp_path / name).exists()] == []
    assert [name for name in KEPT if not (tmp_path / name / "file").exists()] == []
    assert [line.partition(" (")[0] for line in said.splitlines()] == [
        "left: deploy/secrets",
        "left: results",
        f"left: {tmp_path}/cache/paceline",
    ]
    for name in ("deploy/secrets", "results", "cache"):
        shutil.rmtree(tmp_path / name)
    assert clean(tmp_path) == ""

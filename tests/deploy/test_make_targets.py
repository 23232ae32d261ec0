"""What `make` itself does: `make up` ends without a complaint, and `make proto` is silent if nothing changed."""

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


def test_ctrl_c_ends_make_up_without_a_complaint(tmp_path: Path) -> None:
    for name, program in (("paceline", PACELINE), ("python", "#!/bin/sh\n")):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    command = ["make", "--old-file=proto", "up", f"RUN={tmp_path}"]
    pipe = subprocess.PIPE
    # Under `make test`, make would take itself for a part of that one, and announce its directory.
    own = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
    # A terminal sends SIGINT to the whole foreground group, and to nothing else.
    with subprocess.Popen(
        command, cwd=ROOT, env=own, stdout=pipe, stderr=pipe, text=True, start_new_session=True
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

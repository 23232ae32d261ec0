"""A process's directory is removed after its end; those of living processes stay."""

from __future__ import annotations

import subprocess
import sys

from paceline.files.own_directory import OwnDirectory

DIES = (
    "import os, signal, sys\n"
    "from pathlib import Path\n"
    "from paceline.files.own_directory import OwnDirectory\n"
    "own = OwnDirectory(Path(sys.argv[1]), 'kind')\n"
    "(own.path / 'file').touch()\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)


def test_it_goes_when_it_is_closed(tmp_path):
    own = OwnDirectory(tmp_path / "root", "kind")
    (own.path / "file").touch()
    assert own.path.stat().st_mode & 0o777 == 0o700
    own.close()
    assert not list((tmp_path / "root").iterdir())


def test_what_the_dead_left_goes_when_the_next_is_made_and_what_the_living_have_stays(tmp_path):
    living, other = OwnDirectory(tmp_path, "kind"), OwnDirectory(tmp_path, "other")
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 3
    OwnDirectory(tmp_path, "kind").close()
    assert set(tmp_path.iterdir()) == {living.path, other.path}
    for own in (living, other):
        own.close()

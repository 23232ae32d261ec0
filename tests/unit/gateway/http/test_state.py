"""What is said of files of the HTTP state that the gateway's user may not read or write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.http.state import StateUnusable, in_state, lock_state
from gateway.http.tinker.downloads import read_or_make_secret
from gateway.http.tinker.store import Store
from paceline.steady_clock import SteadyClock

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a user who is not root, to whom modes do not apply."""
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, NOBODY, NOBODY)
        yield Path(name)


@contextmanager
def nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def resume_clock(path: Path) -> None:
    with in_state(path):
        SteadyClock().resume(path, counts_downtime=False)


USES = {
    ".lock": lambda path: lock_state(path.parent, "this"),
    "seeds.secret": read_or_make_secret,
    "clock.json": resume_clock,
    "tinker.sqlite": Store,
}


@pytest.mark.parametrize("name", USES)
def test_a_file_that_may_not_be_read_is_named_with_what_to_do(folder, name):
    path = folder / name
    path.write_text("")
    path.chmod(0)
    with nobody(), pytest.raises(StateUnusable, match=r"let the gateway's user read and write the folder") as caught:
        USES[name](path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("mode", [0, 0o300, 0o500])
def test_a_folder_that_may_not_be_used_is_named_with_what_to_do(folder, mode):
    folder.chmod(mode)
    with nobody(), pytest.raises(StateUnusable, match=r"let the gateway's user read and write the folder") as caught:
        lock_state(folder, "this")
    assert str(caught.value).startswith(str(folder))
    folder.chmod(0o700)
    with nobody():
        lock_state(folder, "this").close()

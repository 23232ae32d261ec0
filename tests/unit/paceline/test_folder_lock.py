"""The lock on a folder: nobody gets past it by what he does to the file in the folder."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from paceline.files.folder_lock import FolderInUse, FolderLock
from paceline.files.regular_files import NotRegularFile


def test_the_holder_is_named_until_it_ends(tmp_path):
    with (
        closing(FolderLock(tmp_path, "at port 1")),
        pytest.raises(FolderInUse, match=f"process {os.getpid()} on .*, at"),
    ):
        FolderLock(tmp_path)
    FolderLock(tmp_path).close()


@pytest.mark.parametrize("put", [lambda _: None, lambda file: file.touch(), lambda file: file.mkdir(), os.mkfifo])
def test_a_lock_file_that_is_removed_or_replaced_lets_nobody_in(tmp_path, put):
    with closing(FolderLock(tmp_path)):
        (tmp_path / ".lock").unlink()
        put(tmp_path / ".lock")
        with pytest.raises(FolderInUse, match="unknown"):
            FolderLock(tmp_path)


@pytest.mark.parametrize("put", [lambda file: file.mkdir(), os.mkfifo, lambda file: file.symlink_to("elsewhere")])
def test_a_lock_file_that_is_no_file_is_refused_and_leaves_nothing_locked(tmp_path, put):
    put(tmp_path / ".lock")
    with pytest.raises(NotRegularFile, match=r"\.lock: is a \w+, no regular file"):
        FolderLock(tmp_path)
    (tmp_path / ".lock").rename(tmp_path / "moved")
    FolderLock(tmp_path).close()
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        FolderLock(tmp_path / "nothing")
    assert caught.value.filename == str(tmp_path / "nothing")

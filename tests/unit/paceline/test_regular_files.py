"""Below a directory that others may write to, only files are opened: no link, pipe, socket or folder."""

from __future__ import annotations

import os
import socket

import pytest

from paceline import layout
from paceline.files.regular_files import (
    NotRegularFile,
    copy_file,
    link_file,
    lstat_files,
    open_file,
    open_folder,
    open_or_create,
    read_file,
)


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"secret")
    return file


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


ODD = {
    "link": lambda path, secret: path.symlink_to(secret),
    "dangling link": lambda path, _: path.symlink_to("nothing"),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: put_socket(path),
    "folder": lambda path, _: path.mkdir(),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "use", [open_file, read_file, open_or_create, lambda path: copy_file(path, path.with_name("copy"))]
)
def test_what_is_no_file_is_refused_at_once_by_its_name(tmp_path, secret, kind, use):
    path = tmp_path / "odd"
    ODD[kind](path, secret)
    with pytest.raises(
        NotRegularFile, match=f"is a {kind.split()[-1]}, no regular file; links are not followed"
    ) as caught:
        use(path)
    assert caught.value.field == "odd"
    assert str(tmp_path) not in str(caught.value)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("kind", sorted(ODD.keys() - {"folder"}))
def test_a_link_to_what_is_no_file_leaves_nothing(tmp_path, secret, kind):
    path, folder = tmp_path / "from" / "odd", tmp_path / "to"
    path.parent.mkdir()
    folder.mkdir()
    ODD[kind](path, secret)
    with pytest.raises(NotRegularFile):
        link_file(path, folder / "odd")
    with pytest.raises(NotRegularFile):
        layout.link_files(path.parent, folder)
    with pytest.raises(NotRegularFile):
        lstat_files(path.parent)
    assert not list(folder.iterdir())


def test_files_are_read_linked_and_copied(tmp_path, secret):
    folder = tmp_path / "folder"
    folder.mkdir()
    copy_file(secret, folder / "copy")
    link_file(secret, folder / "link")
    assert [read_file(path) for path in sorted(folder.iterdir())] == [b"secret"] * 2
    assert lstat_files(folder)["link"].st_ino == secret.stat().st_ino


@pytest.mark.parametrize("linked", ["a/b", "a/b/c"])
def test_a_folder_is_opened_through_no_link_in_its_last_names(tmp_path, linked):
    other = tmp_path / "other" / "c"
    other.mkdir(parents=True)
    path = tmp_path / linked
    path.parent.mkdir(parents=True)
    path.symlink_to(other if path.name == "c" else other.parent)
    with pytest.raises(NotADirectoryError), layout.opened(tmp_path / "a" / "b" / "c"):
        raise AssertionError("it was opened")


def test_a_folder_above_may_be_a_link(tmp_path):
    (tmp_path / "disk" / "a" / "b").mkdir(parents=True)
    (tmp_path / "volume").symlink_to("disk")
    os.close(open_folder(tmp_path / "volume" / "a" / "b"))
    with pytest.raises(FileNotFoundError):
        open_folder(tmp_path / "volume" / "a" / "none")

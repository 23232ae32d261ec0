"""Tokenizers sent by a trainer and kept in a cache directory."""

import pytest

from paceline import errors
from paceline.client.tokenizer import cache_directory, store

FILES = {"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"}


def test_the_same_files_are_stored_once_under_the_same_name(tmp_path):
    directory = store(FILES, tmp_path)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES
    assert store(dict(reversed(FILES.items())), tmp_path) == directory
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.parametrize(
    "other",
    [
        {**FILES, "tokenizer.json": b"{ }"},
        {"tokenizer.json": b"{}", "tokenizer_config.jso": b"n[]"},
        {"tokenizer.json": b"{}"},
    ],
)
def test_other_files_have_another_name(tmp_path, other):
    assert store(FILES, tmp_path) != store(other, tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/x", "a\\b", "a\0"])
def test_a_file_name_that_is_a_path_is_refused_and_nothing_is_written(tmp_path, name):
    with pytest.raises(errors.InvalidName):
        store({**FILES, name: b""}, tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_the_user_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "paceline" / "tokenizers"

"""`paceline keys`: what it prints, and what the gateway makes of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.keys import KeyRing
from paceline.cli import main
from paceline.files.api_keys import PREFIX, read_keys
from paceline.rpc.identity import Identity


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def keys(keys_file, capsys):
    """Run `paceline keys`, and return its status and output."""

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main(["keys", *arguments, "--file", str(keys_file)])
        return status, capsys.readouterr().out

    return run


def test_a_key_is_printed_alone_and_admits_its_holder(keys, keys_file):
    status, out = keys("add", "laptop", "--tenant", "team-a", "--expires-in", "90d")
    assert status == 0
    assert out.startswith(PREFIX)
    assert KeyRing(keys_file).identify(out.strip()) == Identity("team-a", "laptop")


def test_the_list_tells_dates_and_no_hash(keys, keys_file):
    keys("add", "laptop", "--tenant", "team-a", "--expires-in", "90d")
    keys("add", "cluster", "--tenant", "team-b")
    keys("expire", "cluster")
    table = keys("list")[1]
    assert "in 90 days" in table
    assert "expired" in table
    listed = json.loads(keys("list", "--json")[1])
    assert [(key["name"], key["tenant"], key["expired"]) for key in listed] == [
        ("laptop", "team-a", False),
        ("cluster", "team-b", True),
    ]
    assert all(key.sha256 not in table and key.sha256 not in json.dumps(listed) for key in read_keys(keys_file))


def test_a_rotation_prints_the_new_key_and_leaves_the_old_one_its_grace(keys, keys_file):
    old = json.loads(keys("add", "laptop", "--tenant", "team-a", "--json")[1])["key"]
    new = keys("rotate", "laptop", "--grace", "1h")[1].strip()
    assert KeyRing(keys_file).identify(old) == KeyRing(keys_file).identify(new) == Identity("team-a", "laptop")
    newest = keys("rotate", "laptop", "--grace", "0")[1].strip()
    assert [KeyRing(keys_file).identify(key) is not None for key in (old, new, newest)] == [False, False, True]


def test_an_expiry_can_be_taken_back(keys, keys_file):
    keys("add", "laptop", "--tenant", "team-a")
    assert json.loads(keys("expire", "laptop", "--in", "7d", "--json")[1])["expires"]
    assert read_keys(keys_file)[0].expires
    keys("expire", "laptop", "--never")
    assert read_keys(keys_file)[0].expires is None
    assert keys("expire", "laptop", "--never", "--in", "7d")[0] == 2


def test_a_removed_key_is_gone_and_an_absent_one_is_named(keys, keys_file, capsys):
    keys("add", "laptop", "--tenant", "team-a")
    assert keys("remove", "laptop")[0] == 0
    assert read_keys(keys_file) == ()
    assert main(["keys", "remove", "laptop", "--file", str(keys_file)]) == 1
    assert "no key is named laptop" in capsys.readouterr().err

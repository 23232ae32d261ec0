"""A row of the track record names the code that was tested."""

import csv
import subprocess

import pytest

from bench import ROOT
from bench.durability import track_record


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, which the track record belongs to."""
    record = tmp_path / "docs" / "track-record.csv"
    record.parent.mkdir()
    for path in (record, tmp_path / "code.py"):
        path.write_text("committed\n")
    identity = ("-c", "user.name=n", "-c", "user.email=n@localhost")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "All")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(track_record, "ROOT", tmp_path)
    monkeypatch.setattr(track_record, "RECORD", record)
    return tmp_path


def test_only_a_change_of_tracked_files_other_than_the_record_makes_a_commit_dirty(repository):
    clean = track_record.commit()
    track_record.RECORD.write_text("another row\n")
    (repository / "untracked").touch()
    assert track_record.commit() == clean
    (repository / "code.py").write_text("changed\n")
    assert track_record.commit() == f"{clean}-dirty"


def test_a_row_is_added_below_the_others_in_the_columns_of_the_file(repository):
    with (ROOT / "docs" / "track-record.csv").open() as file:
        track_record.RECORD.write_text(next(file))
    commit = track_record.commit()
    for found in ("nothing", 'one: "a", then b'):
        row = track_record.Row(test="power cuts", amount="3 of 9 calls", seconds_each="0.5", found=found, command="x")
        track_record.add_row(row)
    with track_record.RECORD.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["found"] for row in rows] == ["nothing", 'one: "a", then b']
    assert {(row["test"], row["commit"], row["amount"], row["command"]) for row in rows} == {
        ("power cuts", commit, "3 of 9 calls", "x")
    }


def test_every_row_of_the_record_has_a_known_test_and_all_columns():
    with (ROOT / "docs" / "track-record.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["test"] for row in rows} == {"chaos", "chaos of the trainer", "power cuts", "fuzz"}
    assert all(None not in row and None not in row.values() for row in rows)

"""A row of the track record names the code that was tested."""

import subprocess

import pytest

from bench.durability import track_record


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, which the track record belongs to."""
    record = tmp_path / "docs" / "track-record.md"
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

"""Files of numbered JSON lines: what is appended is read again, whatever a crash or a person did to the file."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from paceline import errors, layout
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.metrics.log_file import KNOWN_REQUESTS, LogFile
from trainer_service.metrics.rows import RowSource, StoredRow, stored_values
from trainer_service.metrics.shrinking import thin

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def row(step=1, *, seq_id=0, request_id="", **values):
    source = RowSource.CLIENT if request_id else RowSource.TRAINER
    command = "OptimStep" if seq_id else ""
    return StoredRow(
        step=step,
        source=source,
        time=NOW,
        command=command,
        seq_id=seq_id,
        request_id=request_id,
        values=stored_values(values or {"loss": 1.0}),
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def opened(path, most=1 << 20, guard=NO_GUARD):
    return LogFile(path, StoredRow, most, thin, guard, "team")


def read(log, after=0):
    with log.opened(after) as reader:
        return [found for _, found in reader.rows()]


def numbers(log, after=0):
    return [found.number for found in read(log, after)]


def test_rows_are_numbered_from_1_and_read_after_any_number_also_by_another_process(path):
    log = opened(path)
    for step in range(600):
        assert log.append([row(step), row(step)]) == 2 * step + 2
    for same in (log, opened(path)):
        for after in (0, 1, 255, 256, 257, 1199, 1200, 5000):
            assert numbers(same, after) == list(range(after + 1, 1201))
    assert opened(path).append([row()]) == 1201


def test_a_file_that_does_not_exist_has_no_rows(path):
    assert read(opened(path)) == []
    assert not path.exists()


def test_each_line_is_json_that_people_can_read(path):
    opened(path).append([row(7, seq_id=3, loss=0.5, nan=float("nan"), worse=float("inf"), least=float("-inf"))])
    assert json.loads(path.read_text()) == {
        "number": 1,
        "step": 7,
        "source": "trainer",
        "command": "OptimStep",
        "seq_id": 3,
        "time": "2026-01-02T00:00:00Z",
        "values": {"loss": 0.5, "nan": "NaN", "worse": "Infinity", "least": "-Infinity"},
    }


@pytest.mark.parametrize("torn", [b'{"number":3,"st', b'{"number":3}\n{"num', b"\0" * 100, b"\0\n\xff\n", b"[]\n"])
def test_what_a_crash_leaves_of_a_line_is_not_read_and_cut_before_the_next(path, torn):
    opened(path).append([row(1), row(2)])
    whole = path.read_bytes()
    path.write_bytes(whole + torn.replace(b'{"number":3}\n', b""))
    log = opened(path)
    assert numbers(log) == [1, 2]
    assert log.append([row(3)]) == 3
    assert path.read_bytes().startswith(whole)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_damaged_line_in_the_middle_is_left_out(path):
    log = opened(path)
    log.append([row(1), row(2), row(3)])
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\0" * (len(second) - 1) + b"\n" + third)
    assert numbers(opened(path)) == [1, 3]
    assert opened(path).append([row()]) == 4


@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_numbers_are_not_used_again_when_somebody_removes_or_cuts_the_file(path, harm):
    log = opened(path)
    log.append([row(1), row(2)])
    path.unlink() if harm == "removed" else path.write_bytes(b"")
    assert log.append([row(3)]) == 3
    assert numbers(log) == numbers(opened(path)) == [3]


def test_requests_and_commands_are_recognised_also_by_another_process(path):
    log = opened(path)
    for number in range(KNOWN_REQUESTS + 1):
        log.append([row(request_id=f"r{number}"), row(request_id=f"r{number}"), row(seq_id=number + 1)])
    for same in (log, opened(path)):
        assert same.request("r0").lines == 0
        assert (same.request("r1").lines, same.request("r1").number) == (2, 5)
        assert same.has_command("OptimStep", 1)
        assert not same.has_command("PublishWeights", 1)
        assert same.newest_command("OptimStep") == KNOWN_REQUESTS + 1
        assert same.newest_command("PublishWeights") == 0


def test_a_file_stays_below_its_largest_size_and_keeps_first_newest_and_numbers(path):
    log = opened(path, most=8192)
    for step in range(1, 501):
        log.append([row(step, seq_id=step)])
        assert path.stat().st_size <= 8192
    kept = numbers(log)
    assert kept == numbers(opened(path, 8192)) == sorted(set(kept))
    assert kept[-1] == 500
    assert kept[-10:] == list(range(491, 501))
    assert kept[0] == 1
    assert numbers(log, after=kept[3]) == kept[4:]
    assert log.append([row(501)]) == 501


def test_rows_that_are_being_read_stay_when_the_file_is_rewritten_meanwhile(path):
    log = opened(path, most=4096)
    log.append([row(1)])
    while path.stat().st_size < 3500:
        log.append([row(2)])
    with log.opened() as reader:
        before, rows = numbers(log), reader.rows()
        first = next(rows)[1].number
        while numbers(log)[: len(before)] == before:
            log.append([row(3)])
        assert [first, *(found.number for _, found in rows)] == before


def test_a_full_disk_or_quota_refuses_rows_and_leaves_the_file_as_it_was(tmp_path):
    volume = layout.Volume(tmp_path)
    run_id = layout.new_run_id()
    volume.run(run_id).mkdir(parents=True)
    path = volume.run(run_id) / layout.METRICS_FILE
    guard = DiskGuard(0, volume, 1000)
    guard.set_owner(run_id, "team")
    log = opened(path, guard=guard)
    with pytest.raises(errors.QuotaExceeded):
        for step in range(100):
            log.append([row(step)])
    assert guard.used("team") == path.stat().st_size <= 1000
    guard.count(run_id)
    before = path.read_bytes()
    with pytest.raises(errors.DiskFull):
        opened(path, guard=DiskGuard(1 << 60)).append([row()])
    assert path.read_bytes() == before


def test_a_link_in_place_of_the_file_is_not_followed(path, tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    path.symlink_to(other)
    with pytest.raises((OSError, errors.ChecksumMismatch)):
        opened(path).append([row()])
    assert other.read_text() == "kept"

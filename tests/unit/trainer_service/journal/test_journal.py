"""The journal: on disk before anything executes, readable after any crash, and never longer than necessary."""

import asyncio
import os
import resource
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
from support.stacks.journaled import NO_FAILPOINTS, NO_GUARD, JournaledRun, blocked, leave_runs, refusal  # noqa: F401 - a fixture

from paceline import errors, layout
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.failpoints import Failpoints
from trainer_service.journal import journal as journal_module
from trainer_service.journal.format import (
    UNIT,
    AnswerRecord,
    CommandRecord,
    Counters,
    JournalDamagedError,
    RecordedError,
    decode_records,
    encode_records,
)
from trainer_service.journal.history import check_formats, highest_seq_id, read_history, read_index, segments
from trainer_service.journal.journal import RunJournal
from trainer_service.journal.snapshots import SnapshotStore
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.volume_files import UnknownFormatError


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def disk(monkeypatch):
    """The disk that guards see; a test sets how many of its bytes are free."""
    disk = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr("trainer_service.limits.disk_guard.shutil.disk_usage", lambda _: disk)
    return disk


@pytest.fixture
def synced(monkeypatch):
    """How long each file was when its content was synced last, by inode."""
    sync, lengths = os.fdatasync, {}

    def sync_and_note(file):
        sync(file)
        stat = os.fstat(file)
        lengths[stat.st_ino] = stat.st_size

    monkeypatch.setattr(os, "fdatasync", sync_and_note)
    return lengths


def command(seq_id):
    request = pb.OptimStepRequest(run_id="run", seq_id=seq_id)
    request.adamw.learning_rate = 1e-3
    return CommandRecord(seq_id, "OptimStep", "team", request.SerializeToString(deterministic=True))


async def written(directory, *records):
    RunJournal.create(directory, 1)
    journal = RunJournal(directory, read_history(directory), ThreadPoolExecutor(1), NO_FAILPOINTS, NO_GUARD)
    for record in records:
        await journal.append(record, sync=True)
    await journal.flush()
    (path,) = segments(directory).values()
    return path


async def test_a_command_is_on_the_disk_before_it_executes_and_its_answer_before_it_is_told(directory):
    run = JournaledRun(directory)
    seen = []

    async def look():
        seen.append(run.history())

    run.executor.act[1] = look
    reply = await run.send(1)
    assert (list(seen[0].commands), list(seen[0].answers)) == ([1], [])
    assert pb.OptimStepResponse.FromString(run.history().answers[1].reply) == reply


async def test_after_a_restart_answers_are_given_again_and_commands_without_one_execute(directory):
    before = JournaledRun(directory)
    before.executor.act[2] = refusal(errors.NoGradient("there is no gradient"))
    first = await before.send(1)
    with pytest.raises(errors.NoGradient):
        await before.send(2)
    release = asyncio.Event()
    before.executor.act[3] = blocked(release)
    waiting = [before.send(3), before.send(4)]
    await asyncio.wait(waiting, timeout=0.5)
    assert list(before.history().commands) == [1, 2, 3, 4]
    after = JournaledRun(directory)
    assert await after.send(1) == first
    with pytest.raises(errors.NoGradient, match="there is no gradient"):
        await after.send(2)
    with pytest.raises(errors.SeqIdReused):
        await after.send(1, rate=7.0)
    assert after.sequencer.last_seq_id == 4
    assert (await after.send(4)).step == 4
    assert after.executor.ran == [3, 4]
    release.set()


@pytest.mark.parametrize("lost", [1, 64, 127])
async def test_a_torn_end_is_dropped_and_the_journal_goes_on_behind_what_is_whole(directory, lost):
    path = await written(directory, command(1), command(2))
    os.truncate(path, path.stat().st_size - lost)
    assert list(read_history(directory).commands) == [1]
    run = JournaledRun(directory)
    await run.send(2)
    assert list(run.history().commands) == [1, 2]
    assert run.executor.ran == [1, 2]


async def test_a_file_that_was_made_longer_and_never_written_is_a_torn_end(directory):
    path = await written(directory, command(1))
    os.truncate(path, path.stat().st_size + 4096)
    assert list(read_history(directory).commands) == [1]


def frames_of(path):
    """Return the offsets of a segment's frames."""
    data = path.read_bytes()
    return [place for place in range(UNIT, len(data), UNIT) if data[place : place + 4] == b"\xa7PJF"]


@pytest.mark.parametrize("place", range(0, 320, 7))
async def test_damage_to_what_was_durable_is_told_from_a_torn_end(directory, place):
    path = await written(directory, command(1), command(2), command(3))
    assert len(frames_of(path)) == 3
    assert frames_of(path)[2] >= 320
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)
    if data[:8] != b"PACEJNL1" and data[:7] == b"PACEJNL":
        with pytest.raises(UnknownFormatError):
            read_history(directory)
        return
    if not _is_padding(path, place):
        with pytest.raises(JournalDamagedError):
            read_history(directory)


def _is_padding(path, place):
    """Whether the byte at a place is never read: the padding of a header or frame."""
    start = max([0, *(begin for begin in frames_of(path) if begin <= place)])
    if start == 0:
        return 52 <= place < UNIT - 4
    return place >= start + 44 + int.from_bytes(path.read_bytes()[start + 4 : start + 8], "little")


async def test_an_unacknowledged_batch_of_which_only_the_end_reached_the_disk_is_no_damage(directory):
    RunJournal.create(directory, 1)
    journal = RunJournal(directory, read_history(directory), ThreadPoolExecutor(1), NO_FAILPOINTS, NO_GUARD)
    await journal.append(command(1), sync=True)
    for seq_id in (2, 3):  # not synced, and so not acknowledged
        await journal.append(command(seq_id), sync=False)
    (path,) = segments(directory).values()
    second, third = frames_of(path)[1:]
    data = bytearray(path.read_bytes())
    data[second:third] = bytes(third - second)
    path.write_bytes(data)
    assert list(read_history(directory).commands) == [1]
    run = JournaledRun(directory)
    await run.send(2)
    assert (list(run.history().commands), run.executor.ran) == ([1, 2], [1, 2])


async def test_bytes_of_a_client_are_never_taken_for_records(directory):
    forger = directory.with_name("forger")
    path = await written(forger, command(1), AnswerRecord(1, b"d", "OptimStep", b"reply"), command(2))
    stolen = path.read_bytes()  # more than a client can know: a run's records, and frames with another key
    for shift in range(0, UNIT, 16):
        folder = directory.with_name(f"journal-{shift}")
        target = await written(folder, command(1), CommandRecord(2, "X", "t", bytes(shift) + stolen * 3))
        data = bytearray(target.read_bytes())
        data[frames_of(target)[1] + 5] ^= 1  # the second is torn
        target.write_bytes(data)
        history = read_history(folder)
        assert (list(history.commands), history.answers, history.attempts) == ([1], {}, {})


async def test_a_sync_that_fails_gives_the_segment_up_and_nothing_that_was_told_is_lost(directory, synced, monkeypatch):
    run = JournaledRun(directory)
    await run.send(1)
    first = await run.send(2)  # its answer needs no sync, and has none
    (old,) = segments(directory)
    sync, failures = os.fdatasync, [OSError(5, "Input/output error")]

    def fail_once(file):
        if failures:
            raise failures.pop()
        sync(file)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    await run.send(3)
    assert len(segments(directory)) == 2
    with segments(directory)[old].open("r+b") as lost:  # drop what was never synced, as a power cut may
        lost.truncate(synced[os.fstat(lost.fileno()).st_ino])
    assert list(run.history().commands) == [1, 2, 3]
    assert set(run.history().answers) >= {1, 2}
    assert await JournaledRun(directory).send(2) == first


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("then", [OSError(5, "Input/output error"), OSError(28, "No space left on device")])
async def test_a_command_that_a_restart_may_find_is_not_refused(directory, monkeypatch, then, restarts):
    run = JournaledRun(directory)
    await run.send(1)
    failures, sync = [OSError(5, "Input/output error"), then], os.fdatasync

    def fail(file):
        if failures:
            raise failures.pop(0)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", fail)
    waiting = run.send(2)
    while failures:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    assert list(run.history().commands) == [1, 2]
    after = JournaledRun(directory) if restarts else run
    with pytest.raises(errors.SeqIdReused):
        await after.send(2, rate=7.0)
    assert (await after.send(2)).step == 2
    if restarts:
        waiting.cancel()
    else:
        assert (await waiting).step == 2
    assert (await after.send(3)).step == 3
    assert after.executor.ran == ([2, 3] if restarts else [1, 2, 3])
    assert list(after.history().commands) == [1, 2, 3]


async def test_commands_behind_one_that_a_restart_may_find_are_refused_as_ever(directory, disk, monkeypatch):
    run = JournaledRun(directory, guard=DiskGuard(1000))
    await run.send(1)
    sync, refused = os.fdatasync, asyncio.Event()
    withdraw = run.journal.on_refused

    def fail(_file):
        raise OSError(5, "Input/output error")

    def on_refused(error, seq_ids):
        withdraw(error, seq_ids)
        refused.set()

    run.journal.on_refused = on_refused

    monkeypatch.setattr(os, "fdatasync", fail)
    waiting = run.send(2)
    await refused.wait()
    disk.free = 1000
    with pytest.raises(errors.DiskFull):
        await run.send(3)
    assert run.sequencer.last_seq_id == 2
    disk.free = 1 << 40
    monkeypatch.setattr(os, "fdatasync", sync)
    await send_and_read_again(run, [2, 3])
    await waiting
    assert run.executor.ran == [1, 2, 3]


async def test_a_journal_is_closed_between_its_writes(directory):
    before = open_files()
    runs = [JournaledRun(directory / str(number)) for number in range(20)]
    await asyncio.gather(*(run.send(1) for run in runs))
    assert open_files() <= before + 5, "not one for each of them"


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_command_that_arrives_just_as_a_segment_ends_is_not_written_by_two_at_once(directory, monkeypatch):
    """Every turn of the event loop gets its command, so one falls between the end of a rotation and what follows it."""
    await written(directory, command(1))
    journal = RunJournal(directory, read_history(directory), ThreadPoolExecutor(4), NO_FAILPOINTS, NO_GUARD)
    encode_frame, writers, most = journal_module.encode_frame, [], 0

    def slowly(*arguments):
        nonlocal most
        writers.append(arguments)
        most = max(most, len(writers))
        sleep(0.005)
        writers.remove(arguments)
        return encode_frame(*arguments)

    monkeypatch.setattr(journal_module, "encode_frame", slowly)
    await journal.append(command(2), sync=True)
    rotation, appended = asyncio.create_task(journal.rotate()), []
    await asyncio.sleep(0)
    while not rotation.done():
        appended.append(journal.append(command(len(appended) + 3), sync=True))
        await asyncio.sleep(0)
    for _ in range(20):
        appended.append(journal.append(command(len(appended) + 3), sync=True))
        await asyncio.sleep(0.001)
    await asyncio.gather(*appended)
    assert most == 1
    assert list(read_history(directory).commands) == list(range(1, len(appended) + 3))


async def test_the_newest_segment_is_missed_when_it_is_gone(directory):
    run = JournaledRun(directory)
    await run.send(1)
    await run.journal.rotate()
    await run.send(2)
    list(segments(directory).values())[-1].unlink()
    index = read_index(directory)
    with pytest.raises(JournalDamagedError):
        read_history(directory, 0, index.newest)
    assert highest_seq_id(directory, index.newest) is None
    assert index.limit >= 2


async def test_a_journal_of_another_format_is_refused_and_not_touched(directory):
    path = await written(directory, command(1))
    other = b"PACEJNL2" + path.read_bytes()[8:]
    path.write_bytes(other)
    with pytest.raises(UnknownFormatError):
        check_formats(directory)
    with pytest.raises(UnknownFormatError):
        read_history(directory)
    assert path.read_bytes() == other


async def test_a_journal_without_its_segments_or_with_a_command_missing_is_damaged(directory):
    path = await written(directory, command(1), command(3))
    with pytest.raises(JournalDamagedError, match="command 2 is missing"):
        read_history(directory)
    path.unlink()
    with pytest.raises(JournalDamagedError):
        read_history(directory)


def test_a_record_comes_back_as_it_was():
    records = [command(1), AnswerRecord(1, b"d", "OptimStep", b"reply", None, Counters(3, 2, 4))]
    assert decode_records(encode_records(records)) == records


@pytest.mark.parametrize("reason", errors.CATALOG)
def test_every_error_comes_back_from_a_record(reason):
    error = errors.CATALOG[reason]("what is wrong", field="a.b", metadata={"limit": "3"}, retry_after=1.5)
    (record,) = decode_records(encode_records([AnswerRecord(1, b"d", "X", None, RecordedError.of(error))]))
    found = record.failure.error()
    assert type(found) is type(error)
    assert (found.message, found.field, found.metadata, found.retry_after) == (
        "what is wrong",
        "a.b",
        {"limit": "3"},
        1.5,
    )


async def test_commands_that_wait_at_the_same_time_share_one_sync(directory, monkeypatch):
    syncs = []
    sync = os.fdatasync
    run = JournaledRun(directory)
    monkeypatch.setattr(os, "fdatasync", lambda file: (syncs.append(file), sync(file)))
    await asyncio.gather(*(run.send(seq_id) for seq_id in range(1, 65)))
    assert run.executor.ran == list(range(1, 65))
    assert len(syncs) <= 3


@contextmanager
def full_disk(directory, more=0):
    """Let no file grow beyond the journal's size, which is so large that only the journal reaches the limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = sum(path.stat().st_size for path in directory.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_refuses_the_command_executes_nothing_and_leaves_its_seq_id_free(directory):
    run = JournaledRun(directory)
    await run.send_large(1)
    with full_disk(directory, more=100):
        refused = await asyncio.gather(run.send(2), run.send(3), return_exceptions=True)
    assert [type(error) for error in refused] == [errors.DiskFull] * 2
    assert refused[0].retry_after, "the client sends it again"
    assert (run.executor.ran, run.sequencer.last_seq_id) == ([1], 1)
    await run.send(2)
    await run.send(3)
    assert run.executor.ran == [1, 2, 3]
    assert list(run.history().answers) == [1, 2, 3]


async def test_a_disk_with_too_little_room_refuses_commands_before_it_is_full_and_takes_answers(directory, disk):
    run = JournaledRun(directory, guard=DiskGuard(1000))
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    first = run.send(1)
    await asyncio.wait({first}, timeout=0.5)
    disk.free = 1000
    with pytest.raises(errors.DiskFull) as caught:
        await run.send(2)
    assert int(caught.value.metadata["free_bytes"]) == 1000 < int(caught.value.metadata["needed_bytes"])
    assert caught.value.retry_after
    release.set()
    await first
    assert (list(run.history().commands), list(run.history().answers)) == ([1], [1])
    disk.free = 1 << 40
    await run.send(2)
    assert run.executor.ran == [1, 2]


async def test_a_snapshot_that_would_leave_too_little_room_is_not_begun(tmp_path):
    free = shutil.disk_usage(tmp_path).free

    async def write(directory):
        raise AssertionError("not begun")

    with pytest.raises(errors.DiskFull):
        await SnapshotStore(tmp_path, NO_FAILPOINTS, NO_GUARD).save(1, 2 * free, write)
    assert list(tmp_path.iterdir()) == []


async def test_an_answer_for_which_there_was_no_room_is_written_with_the_next_command(directory):
    run = JournaledRun(directory)
    with ExitStack() as limit:

        async def fill():
            limit.enter_context(full_disk(directory))

        run.executor.act[1] = fill
        assert (await run.send_large(1)).step == 1
        assert list(run.history().answers) == []
    await run.send(2)
    assert list(run.history().answers) == [1, 2]


async def test_a_refusal_is_not_told_before_it_is_written_as_another_execution_may_end_otherwise(directory):
    run = JournaledRun(directory)
    with ExitStack() as limit:

        async def fill():
            limit.enter_context(full_disk(directory))
            raise errors.DiskFull("no space for a checkpoint")

        run.executor.act[1] = fill
        told = run.send_large(1)
        assert not (await asyncio.wait({told}, timeout=0.5))[0]
        assert list(run.history().answers) == []
    with pytest.raises(errors.DiskFull, match="no space for a checkpoint"):
        await told
    assert list(run.history().answers) == [1]


async def test_segments_before_a_snapshot_are_removed_and_none_after_it(directory):
    run = JournaledRun(directory)
    for seq_id in (1, 2):
        await run.send(seq_id)
    await run.journal.rotate()
    await run.send(3)
    await run.journal.rotate()
    await run.journal.rotate()
    await run.send(4)
    await run.journal.drop(2)
    assert list(run.history().commands) == [3, 4]
    await run.journal.drop(3)
    await run.journal.drop(3)
    assert list(run.history().commands) == [4]
    assert JournaledRun(directory).sequencer.last_seq_id == 4


async def test_a_segment_begins_with_what_the_one_before_does_not_hold_however_commands_come(directory):
    run = JournaledRun(directory)
    await run.send(1)
    second = run.send(2)
    rotating = asyncio.ensure_future(run.journal.rotate())
    third = run.send(3)
    await asyncio.gather(second, rotating, third)
    await run.journal.drop(2)
    assert 3 in run.history().commands
    assert JournaledRun(directory).sequencer.last_seq_id == 3


async def test_a_snapshot_comes_back_whole_or_not_at_all(tmp_path):
    store = SnapshotStore(tmp_path, NO_FAILPOINTS, NO_GUARD)
    answers = [AnswerRecord(5, b"digest", "OptimStep", b"reply")]

    async def write(directory):
        (directory / "weights").write_bytes(b"w" * 100)
        return Counters(step=seq_id), answers

    for seq_id in (2, 3, 5):
        await store.save(seq_id, 100, write)
    (tmp_path / "snapshots" / "4.bak").mkdir()
    assert store.drop_old() == 3
    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == {"3", "5", "4.bak"}
    snapshot = store.newest()
    assert (snapshot.seq_id, snapshot.counters, snapshot.answers) == (5, Counters(step=5), answers)
    (snapshot.directory / "weights").write_bytes(b"v" * 100)
    assert store.newest().seq_id == 3
    assert layout.find_quarantined(tmp_path) == ["snapshots/5.damaged-1"]


def test_failpoints_are_checked_and_off_by_default():
    for spec in ("after_snyc:1", "after_sync", "after_sync:x"):
        with pytest.raises(ValueError, match="name:count"):
            Failpoints(spec)
    points = Failpoints("after_sync:3,engine_OptimStep:1+")
    points.hit("after_sync")
    points.hit("before_ack")
    assert points.lasting == "engine_OptimStep:1+"


async def test_reading_a_journal_takes_the_memory_of_what_it_says_and_of_one_segment(directory):
    size, parts = 1 << 20, 8
    RunJournal.create(directory, 1)
    journal = RunJournal(directory, read_history(directory), ThreadPoolExecutor(1), NO_FAILPOINTS, NO_GUARD)
    for seq_id in range(1, parts + 1):
        await journal.append(CommandRecord(seq_id, "ForwardBackward", "team", os.urandom(size)), sync=True)
        await journal.rotate()
    tracemalloc.start()
    try:
        history = read_history(directory)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.commands) == parts
    assert kept < (parts + 1) * size
    assert most < (parts + 5) * size


def fail_once(monkeypatch, target, name, error):
    """Let a function fail at its next call."""
    real, left = getattr(target, name), [error]

    def fail(*arguments, **options):
        if left:
            raise left.pop()
        return real(*arguments, **options)

    monkeypatch.setattr(target, name, fail)


async def send_and_read_again(run, seq_ids):
    """Send commands, and check that a restart finds them and all before them."""
    for seq_id in seq_ids:
        await run.send(seq_id)
    expected = list(range(1, seq_ids[-1] + 1))
    assert list(run.history().commands) == list(run.history().answers) == expected


@pytest.mark.parametrize("step", ["header", "index"])
async def test_what_follows_a_rotation_that_failed_is_read_again(directory, monkeypatch, step):
    run = JournaledRun(directory)
    await send_and_read_again(run, [1, 2, 3])
    if step == "index":
        fail_once(monkeypatch, journal_module, "write_index", errors.DiskFull("full"))
    else:
        fail_once(monkeypatch, layout, "sync_directory", OSError(5, "Input/output error"))
    await run.journal.rotate()
    await send_and_read_again(run, [4, 5])
    await run.journal.rotate()
    await send_and_read_again(JournaledRun(directory), [6, 7])


async def test_what_follows_a_segment_that_could_not_be_begun_is_read_again(directory, monkeypatch):
    run = JournaledRun(directory)
    await send_and_read_again(run, [1, 2])
    fail_once(monkeypatch, os, "fdatasync", OSError(5, "Input/output error"))
    fail_once(monkeypatch, journal_module, "write_index", OSError(5, "Input/output error"))
    await send_and_read_again(run, [3, 4])
    await send_and_read_again(JournaledRun(directory), [5])


@pytest.mark.parametrize("fails_before", [False, True])
async def test_a_rotation_whose_sync_fails_gives_the_segment_up(directory, synced, monkeypatch, fails_before):
    run = JournaledRun(directory)
    if fails_before:
        went_on = asyncio.Event()

        async def wait():
            await went_on.wait()

        run.executor.act[1] = wait
        sending = run.send(1)
        while not run.journal.appended_bytes:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
        fail_once(monkeypatch, layout, "write_file", errors.DiskFull("full"))
        await run.journal.rotate()
        went_on.set()
        await sending
    else:
        await run.send(1)  # its answer needs no sync, and has none
    sync = os.fdatasync

    def lose(file):
        monkeypatch.setattr(os, "fdatasync", sync)
        stat = os.fstat(file)
        kept = synced.get(stat.st_ino, UNIT)
        assert stat.st_size > kept
        os.pwrite(file, bytes(stat.st_size - kept), kept)  # the kernel drops what it could not write
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", lose)
    await run.journal.rotate()
    assert [record.seq_id for record in run.journal.unwritten()] == [1]
    await send_and_read_again(run, [2, 3])
    await send_and_read_again(JournaledRun(directory), [4])


async def test_answers_without_room_are_known_to_who_reads_the_run_again(directory):
    run = JournaledRun(directory)
    await run.send(1)
    with ExitStack() as limit:

        async def fill():
            limit.enter_context(full_disk(directory))

        run.executor.act[2] = fill
        await run.send_large(2)
        history = run.history()
        assert list(history.answers) == [1]
        history.add_answers(run.journal.unwritten())
        assert list(history.answers) == [1, 2]
    await run.send(3)
    assert run.journal.unwritten() == []


async def test_a_damaged_journal_for_whose_successor_there_was_no_room_is_set_aside_once(directory, monkeypatch):
    run = JournaledRun(directory)
    await run.send(1)
    fail_once(monkeypatch, layout, "new_directory", errors.DiskFull("full"))
    with pytest.raises(errors.DiskFull):
        await run.journal.start_over()
    assert await run.journal.start_over() == "journal.damaged-1"
    await run.send(2)
    assert list(run.history().commands) == [2]


async def test_a_new_journal_goes_on_although_there_was_no_room_for_its_index(directory, monkeypatch):
    run = JournaledRun(directory)
    await run.send(1)
    fail_once(monkeypatch, journal_module, "write_index", errors.DiskFull("full"))
    with pytest.raises(errors.DiskFull):
        await run.journal.start_over()
    await run.send(2)
    await run.journal.rotate()
    await run.send(3)
    assert list(run.history().commands) == [2, 3]

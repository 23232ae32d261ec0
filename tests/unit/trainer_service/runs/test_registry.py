"""Runs on the volume: what a start finds, leaves alone and removes when the disk fails or is full."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from support.stacks.journaled import Executor

from paceline import errors, layout
from paceline.layout import CheckpointPath
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import Identity
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CheckpointKind, LoraConfig, RunState
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.commands import SnapshotPolicy
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.journal.format import Counters
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.limits.gates import ByteGate
from trainer_service.recovery import Recovery
from trainer_service.runs.command import Command
from trainer_service.runs.deletion import DeletedRuns
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.storage import RunStorage
from trainer_service.service_metrics import TrainerMetrics
from trainer_service.settings import TrainerSettings

METRICS = TrainerMetrics(CollectorRegistry())
TEAM = Identity("team")
RUN, OTHER = (layout.new_run_id() for _ in range(2))


@pytest.fixture
def volume(tmp_path):
    return layout.Volume(tmp_path / "volume")


def storage_of(volume):
    settings = TrainerSettings(model="tiny", checkpoint_dir=volume.root, min_free_bytes=0, insecure=True)
    return RunStorage(volume, settings, NO_FAILPOINTS, WaitingBytes(), NO_GUARD)


@asynccontextmanager
async def registry_of(volume, storage=None, guard=None):
    """Yield a registry that has read the volume, as at a start."""
    registry = RunRegistry(volume, storage or storage_of(volume), guard or DiskGuard(volume=volume))
    try:
        await registry.restore()
        yield registry
    finally:
        await registry.close()


async def make_run(registry, run_id, commands=5):
    """Make a run that executed commands and has snapshots after the first and the second."""
    async with registry.creating(run_id, TEAM.tenant) as (sequencer, snapshots):
        record = RunRecord(
            run_id=run_id,
            tenant=TEAM.tenant,
            base_model="tiny",
            parameters=LoraConfig(rank=4),
            create_time=datetime.now(UTC),
            trainable_parameters=1,
            request_id=f"request of {run_id}",
            request_digest="d1",
            sequencer=sequencer,
            snapshots=snapshots,
        )
        await registry.add(record)
    executor = Executor()
    sequencer.start(executor)
    for seq_id in range(1, commands + 1):
        await sequencer.execute(Command.of(pb.OptimStepRequest(run_id=run_id, seq_id=seq_id), TEAM.tenant))
        if seq_id <= 2:
            await take_snapshot(record, executor, seq_id)
    return record


async def take_snapshot(record, executor, seq_id):
    async def write(directory):
        (directory / "weights").write_bytes(b"w" * 1000)
        await record.sequencer.answered(seq_id, executor)
        return Counters(step=seq_id), list(record.sequencer.answers)

    await record.sequencer.journal.rotate()
    await record.snapshots.save(seq_id, 1000, write)
    await record.sequencer.journal.drop(record.snapshots.drop_old())


@pytest.fixture
def full_disk(monkeypatch):
    """Return a context manager within which no file of the volume can be written."""

    def full(*_):
        raise layout.translate_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    @contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(layout, "write_file", full)
            patch.setattr(layout, "new_directory", full)
            yield

    return block


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def unreadable(monkeypatch):
    """Return a function that makes the next reads of a file fail with EIO, as on a failing disk."""
    failing: list[Path] = []

    def checked(function):
        def call(file, *args, **kwargs):
            mode = kwargs.get("mode", args[0] if args else "r")
            is_read = mode & os.O_ACCMODE == os.O_RDONLY if isinstance(mode, int) else "r" in mode
            if is_read and isinstance(file, str | os.PathLike) and Path(file) in failing:
                failing.remove(Path(file))
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
            return function(file, *args, **kwargs)

        return call

    for module in (io, __import__("builtins")):
        monkeypatch.setattr(module, "open", checked(open))
    monkeypatch.setattr(os, "open", checked(os.open))

    def fail(path, times):
        failing[:] = [path] * times

    return fail


@pytest.mark.asyncio
@pytest.mark.parametrize("names", [{RUN}, {"state"}])
async def test_a_folder_that_cannot_be_searched_keeps_no_other_run_from_being_served(volume, monkeypatch, names):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
        await make_run(registry, OTHER)
    (volume.run(RUN) / "state" / "best").mkdir(parents=True)
    (volume.run(OTHER) / "state" / "best").mkdir(parents=True)

    def searching(function):
        def call(path=".", *args, **kwargs):
            if isinstance(path, str | os.PathLike):
                below = Path(path).parts if function is os.scandir else Path(path).parent.parts
                if names & set(below) and RUN in Path(path).parts:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("stat", "scandir", "listdir", "open"):
            patch.setattr(os, name, searching(getattr(os, name)))
        async with registry_of(volume) as registry:
            assert registry.get(OTHER, TEAM).sequencer.last_seq_id == 5
        found = list(volume.checkpoints())
        assert CheckpointPath(OTHER, CheckpointKind.STATE, "best") in found
        assert await CheckpointStore(volume).delete_expired() == []
    async with registry_of(volume) as registry:
        assert registry.get(RUN, TEAM).sequencer.last_seq_id == 5


@pytest.mark.asyncio
@pytest.mark.parametrize("times", [1, 1000])
async def test_a_file_that_cannot_be_read_now_costs_nothing_and_changes_nothing(volume, unreadable, times):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
        await make_run(registry, OTHER)
    folder = volume.run(RUN)
    intact = contents(folder)
    assert {path.parts[0] for path in intact} == {"run.json", "run.copy.json", "journal", "journal.json", "snapshots"}
    served = []
    for name in intact:
        unreadable(folder / name, times)
        async with registry_of(volume) as registry:
            with suppress(errors.RunStateLost):
                served.append((name, registry.get(RUN, TEAM).sequencer.last_seq_id))
            assert registry.get(OTHER, TEAM).sequencer.last_seq_id == 5
        unreadable(folder / name, 0)
        assert contents(folder) == intact, name
    spare = [name for name in intact if name.parts[0] == "run.copy.json" or name.parts[:2] == ("snapshots", "1")]
    assert served == [(name, 5) for name in spare]
    async with registry_of(volume) as registry:
        assert (registry.get(RUN, TEAM).step, registry.get(RUN, TEAM).sequencer.last_seq_id) == (5, 5)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["no journal", "no index", "journal", "half a file"])
async def test_what_a_killed_create_run_leaves_is_removed_at_the_next_start(volume, how):
    async with registry_of(volume) as registry:
        with pytest.raises(asyncio.CancelledError):
            async with registry.creating(RUN, TEAM.tenant):
                left = contents(volume.run(RUN))
                raise asyncio.CancelledError
    folder = volume.run(RUN)
    folder.mkdir()
    if how != "no journal":
        for name, content in left.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    if how == "no index":
        (folder / "journal.json").unlink()
    if how == "half a file":
        (folder / f"{layout.STAGED}1").write_bytes(b"{")
    async with registry_of(volume) as registry:
        assert not list(volume.runs.iterdir())
        with pytest.raises(errors.RunNotFound):
            registry.get(RUN, TEAM)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["commands", "a torn command", "a checkpoint"])
async def test_a_run_without_its_file_is_left_as_it_is_where_it_holds_something(volume, what):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN, commands=1 if what == "commands" else 0)
    folder = volume.run(RUN)
    for name in ("run.json", "run.copy.json"):
        (folder / name).unlink()
    if what == "a torn command":
        (segment,) = (folder / "journal").iterdir()
        segment.write_bytes(segment.read_bytes() + b"\1" * 100)
    if what == "a checkpoint":
        (folder / "state" / "x").mkdir(parents=True)
    before = contents(folder)
    async with registry_of(volume) as registry:
        with pytest.raises(errors.RunStateLost):
            registry.get(RUN, TEAM)
        assert contents(folder) == before


@pytest.mark.asyncio
@pytest.mark.parametrize("keep_checkpoints", [True, False])
async def test_a_run_that_is_deleted_on_a_full_disk_frees_its_room_and_does_not_return(
    volume, full_disk, keep_checkpoints
):
    async with registry_of(volume) as registry:
        record = await make_run(registry, RUN)
        folder = volume.run(RUN)
        (folder / "state" / "x").mkdir(parents=True)
        (folder / "state" / "x" / "weights").write_bytes(b"w" * 100_000)
        with full_disk():
            await registry.remove(record, keep_checkpoints=keep_checkpoints)
            with pytest.raises(errors.RunNotFound):
                registry.get(RUN, TEAM)
            left = {path.name for path in volume.runs.rglob("*") if path.is_file()}
            assert left == (
                {"deleted.json", "run.copy.json", "weights"} if keep_checkpoints else {"run.json", "run.copy.json"}
            )
            async with registry_of(volume) as again:  # a start while the disk is full
                with pytest.raises(errors.RunNotFound):
                    again.get(RUN, TEAM)
    async with registry_of(volume) as registry:
        with pytest.raises(errors.RunNotFound):
            registry.get(RUN, TEAM)
        assert registry.find_deleted(TEAM.tenant, f"request of {RUN}") == "d1"
    left = {path.name for path in volume.runs.rglob("*") if path.is_file()}
    assert left == ({"deleted.json", "weights"} if keep_checkpoints else set())


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["a volume without its file", "a damaged run.json", "a damaged journal"])
async def test_a_start_on_a_full_disk_serves_what_is_there_and_the_next_one_writes_the_rest(volume, full_disk, what):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
        await make_run(registry, OTHER)
    folder = volume.run(RUN)
    if what == "a volume without its file":
        (volume.root / "volume.json").unlink()
    if what == "a damaged run.json":
        (folder / "run.json").write_bytes(b"}" * 200)
    if what == "a damaged journal":
        for segment in (folder / "journal").iterdir():
            segment.write_bytes(bytes(byte ^ 1 for byte in segment.read_bytes()))
    with full_disk():
        async with registry_of(volume) as registry:
            assert registry.get(OTHER, TEAM).state is RunState.READY
            if what == "a damaged journal":
                with pytest.raises(errors.RunStateLost):
                    registry.get(RUN, TEAM)
            else:
                await registry.remove(registry.get(RUN, TEAM), keep_checkpoints=False)
    async with registry_of(volume) as registry:
        assert registry.get(OTHER, TEAM).state is RunState.READY
        assert (volume.root / "volume.json").exists()
        if what == "a damaged journal":
            assert registry.get(RUN, TEAM).state is RunState.LOST
            assert any(path.name.startswith("journal.damaged") for path in folder.iterdir())


@pytest.mark.asyncio
async def test_an_unreadable_run_is_absent_for_all_but_its_owner(volume):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
    for segment in (volume.run(RUN) / "journal").iterdir():
        segment.write_bytes(b"PACEJNL9" + segment.read_bytes()[8:])  # of a later format
    async with registry_of(volume) as registry:
        with pytest.raises(errors.RunStateLost):
            registry.get(RUN, TEAM)
        with pytest.raises(errors.RunNotFound):
            registry.get(RUN, Identity("stranger"))


def test_a_checkpoint_may_have_the_name_of_what_is_set_aside(volume):
    for name in ("state/x.damaged-1", "sampler/y.damaged-2", "versions/3.damaged-1"):
        (volume.run(RUN) / name).mkdir(parents=True)
    assert layout.find_quarantined(volume.run(RUN)) == ["versions/3.damaged-1"]


def test_a_tenant_that_deletes_many_runs_has_no_request_of_another_forgotten(volume, monkeypatch):
    monkeypatch.setattr("trainer_service.runs.deletion.KEPT_REQUESTS", 3)
    volume.root.mkdir()
    deleted = DeletedRuns(volume.root)
    deleted.add("calm", "r0", "d0", "run of calm")
    for number in range(5):
        deleted.add("busy", f"r{number}", "d", f"run {number}")
    again = DeletedRuns(volume.root)
    again.read()
    assert again.find("calm", "r0") == "d0"
    assert [again.find("busy", f"r{number}") for number in range(5)] == ["", "", "d", "d", "d"]
    assert again.run_ids() == {"run of calm", "run 2", "run 3", "run 4"}


@pytest.mark.asyncio
async def test_a_snapshot_and_the_folders_above_it_are_synced_before_the_journal_lets_go_of_what_it_replaces(
    volume, monkeypatch
):
    events: list[tuple[str, Path]] = []
    fsync, unlink = os.fsync, os.unlink

    def noted_fsync(descriptor):
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def noted_unlink(path, **options):
        events.append(("unlink", Path(path)))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "unlink", noted_unlink)
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
    folder = volume.run(RUN)
    cut = next(i for i, (what, path) in enumerate(events) if what == "unlink" and path.suffix == ".journal")
    synced = [path for what, path in events[:cut] if what == "sync"]
    # The last folder to be made gets its name last, and its parent is synced with that name in it.
    for parent in (volume.root, volume.runs, folder, folder / "snapshots"):
        assert parent in synced
    assert {path.name for path in synced} >= {"weights", "counters.json", "answers", "SHA256SUMS"}


@pytest.mark.parametrize("parts", ["sampler/x", "state/x", "versions/1", "snapshots/2", "loads/3"])
def test_a_new_directory_is_durable_with_the_names_of_the_folders_above_it(tmp_path, monkeypatch, parts):
    folder = tmp_path / "run"
    folder.mkdir()
    synced: list[tuple[Path, set[str]]] = []
    fsync = os.fsync

    def noted(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path, {child.name for child in path.iterdir()} if path.is_dir() else set()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    kind, name = parts.split("/")
    with layout.new_directory(folder / parts) as staging:
        (staging / "weights").write_bytes(b"w")
    assert any(path == folder and kind in names for path, names in synced)
    assert any(path == folder / kind and name in names for path, names in synced)
    assert any(path.name == "weights" for path, _ in synced)


class Rebuilding:
    """The parts of engine, publisher and commands that recovery uses; records the journal bytes in use meanwhile."""

    def __init__(self, gate):
        self.gate = gate
        self.used = {}
        self.replayed = []

    async def create_run(self, run_id, parameters):
        for _ in range(100):  # let others advance as far as they can
            await asyncio.sleep(0)
        self.used[run_id] = self.gate.used

    async def execute(self, run, command, progress):
        self.replayed.append(command.seq_id)
        return pb.OptimStepResponse(step=command.seq_id)

    async def delete_run(self, run_id):
        pass

    async def load_state(self, run_id, directory, *, with_optimizer):
        pass

    async def save_state(self, run_id, directory, captured):
        pass

    def all_returned(self, run):
        pass

    async def settled(self, run_id):
        pass


async def test_journals_are_read_one_after_the_other_where_memory_holds_one(volume):
    run_ids = [layout.new_run_id() for _ in range(3)]
    async with registry_of(volume) as registry:
        for run_id in run_ids:
            await make_run(registry, run_id)
    storage = storage_of(volume)
    async with registry_of(volume, storage) as registry:
        gate, policy = ByteGate(1), SnapshotPolicy(1000, 1 << 30, 1e9)
        doing = Rebuilding(gate)
        recovery = Recovery(
            doing,
            storage,
            doing,
            doing,
            policy,
            gate,
            NO_FAILPOINTS,
            asyncio.ensure_future,
            None,
            registry,
            METRICS,
            None,
            None,
        )
        await asyncio.gather(*(recovery.recover(run) for run in registry))
        assert doing.used == {run_id: storage.journal_bytes(run_id) for run_id in run_ids}
        assert gate.used == 0
        assert all(run.is_restored for run in registry)


def test_runs_that_are_deleted_at_the_same_time_are_all_remembered(tmp_path):
    deleted = DeletedRuns(tmp_path)
    for turn in range(20):
        ids = [f"{turn} {number}" for number in range(8)]
        with ThreadPoolExecutor(len(ids)) as threads:
            list(threads.map(lambda request_id: deleted.add("team", request_id, "digest", request_id), ids))
        again = DeletedRuns(tmp_path)
        again.read()
        assert all(again.find("team", request_id) for request_id in ids)


async def test_what_a_crash_left_among_the_checkpoints_of_a_deleted_run_is_removed(volume):
    async with registry_of(volume) as registry:
        run = await make_run(registry, RUN)
        (volume.run(RUN) / "state" / "best").mkdir(parents=True)
        await registry.remove(run, keep_checkpoints=True)
    left = volume.run(RUN) / "state" / f".old-{'0' * 32}"
    left.mkdir()
    async with registry_of(volume):
        assert not left.exists()
        assert (volume.run(RUN) / "state" / "best").exists()


async def test_a_step_whose_answer_found_no_space_is_in_the_run_that_is_rebuilt(volume, monkeypatch):
    storage = storage_of(volume)
    async with registry_of(volume, storage) as registry:
        run = await make_run(registry, RUN)
        gate, policy, left = ByteGate(1 << 30), SnapshotPolicy(1000, 1 << 30, 1e9), [layout.write_all]

        def write_once(*arguments):  # the command, and not its answer
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left.pop()(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(layout, "write_all", write_once)
            command = Command.of(pb.OptimStepRequest(run_id=RUN, seq_id=6), TEAM.tenant)
            assert (await run.sequencer.execute(command)).step == 6
            run.sequencer.pause()
            run.in_engine = run.is_restored = False
            doing = Rebuilding(gate)
            recovery = Recovery(
                doing,
                storage,
                doing,
                doing,
                policy,
                gate,
                NO_FAILPOINTS,
                asyncio.ensure_future,
                None,
                registry,
                METRICS,
                None,
                None,
            )
            await recovery.recover(run)
        assert doing.replayed == [3, 4, 5, 6]


async def test_what_a_killed_trainer_wrote_and_did_not_sync_is_synced_before_it_counts(volume, monkeypatch):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
    synced = []

    def noted(function):
        def call(descriptor):
            function(descriptor)
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

        return call

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    journal = volume.run(RUN) / "journal"
    renamed = {volume.root, volume.runs, volume.run(RUN), journal}
    async with registry_of(volume):
        assert {*renamed, *journal.iterdir()} == set(synced)
        assert len(synced) == len(set(synced)), "a start with many runs takes long enough"


async def test_a_run_whose_journal_cannot_be_listed_is_not_taken_for_one_without(volume, monkeypatch):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
    listdir = os.listdir

    def exhausted(path="."):
        if Path(path).name in {"journal", "snapshots"}:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return listdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", exhausted)
        async with registry_of(volume) as registry:
            with pytest.raises(errors.PacelineError, match="Too many open files"):
                registry.get(RUN, TEAM)
    async with registry_of(volume) as registry:
        assert registry.get(RUN, TEAM).state is RunState.READY
    assert not list(volume.run(RUN).glob("*.damaged-*"))


@pytest.mark.parametrize("name", ["versions", "loads", "state", "sampler"])
async def test_a_run_is_served_although_a_folder_that_its_state_is_not_in_cannot_be_listed(volume, monkeypatch, name):
    async with registry_of(volume) as registry:
        await make_run(registry, RUN)
    folder = volume.run(RUN)
    (folder / name).mkdir()
    (folder / "snapshots" / "1").rename(folder / "snapshots" / "1.damaged-1")
    left = folder / "snapshots" / f"{layout.STAGED}3"
    left.mkdir()

    def unlistable(function):
        def call(path="."):
            if str(path) == str(folder / name):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return function(path)

        return call

    for each in ("listdir", "scandir"):
        monkeypatch.setattr(os, each, unlistable(getattr(os, each)))
    guard = DiskGuard(volume=volume)
    async with registry_of(volume, guard=guard) as registry:
        run = registry.get(RUN, TEAM)
        assert (run.state, run.sequencer.last_seq_id) == (RunState.READY, 5)
        assert run.damage == ["snapshots/1.damaged-1"]
        assert not left.exists()
        assert guard.used(TEAM.tenant) > 1000, "the snapshots are counted"

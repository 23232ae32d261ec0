"""How many bytes each tenant has on the checkpoint volume."""

from __future__ import annotations

import asyncio
import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline import errors, layout
from paceline.layout import CheckpointPath
from paceline.rpc.identity import Identity
from paceline.types import CheckpointKind
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.journal.format import CommandRecord, Counters
from trainer_service.journal.history import read_history
from trainer_service.journal.journal import RunJournal
from trainer_service.journal.snapshots import SnapshotStore
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.volume_files import write_run_file

A, B = "anquetil", "bartali"
RUNS = {A: "run-" + "a" * 32, B: "run-" + "b" * 32}


@pytest.fixture
def volume(tmp_path: Path) -> layout.Volume:
    volume = layout.Volume(tmp_path)
    for tenant, run_id in RUNS.items():
        layout.make_folder(volume.run(run_id))
        write_run_file(volume.run(run_id), {"tenant": tenant})
    return volume


@pytest.fixture
def counted(volume) -> DiskGuard:
    counted = DiskGuard(volume=volume)
    counted.count_all()
    return counted


def on_disk(volume: layout.Volume, tenant: str) -> int:
    return sum(path.stat().st_size for path in volume.run(RUNS[tenant]).glob("*/**/*") if path.is_file())


async def write(directory: Path, size: int = 5000) -> None:
    save_file({"a": np.zeros(size // 4, np.float32)}, directory / layout.WEIGHTS_FILE)
    (directory / layout.CONFIG_FILE).write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')


async def save(
    store: CheckpointStore, name: str, tenant: str = A, *, size: int = 5000, overwrite: bool = False
) -> None:
    path = CheckpointPath(RUNS[tenant], CheckpointKind.STATE, name)
    await store.save(
        path,
        lambda directory: write(directory, size),
        base_model="tiny",
        tenant=tenant,
        step=0,
        ttl_seconds=None,
        overwrite=overwrite,
    )


async def test_checkpoints_count_while_they_are_there(volume, counted):
    store = CheckpointStore(volume, guard=counted)
    await save(store, "one")
    await save(store, "two", B)
    assert counted.used(A) == on_disk(volume, A) > 5000
    assert counted.used(B) == on_disk(volume, B)
    await save(store, "one", size=9000, overwrite=True)
    assert counted.used(A) == on_disk(volume, A) > 9000
    await store.delete(CheckpointPath(RUNS[A], CheckpointKind.STATE, "one"), Identity(A))
    assert counted.used(A) == 0
    assert counted.tenants() == [B]


async def test_a_save_that_fails_counts_as_nothing(volume, counted):
    async def fail(directory: Path) -> None:
        await write(directory)
        raise errors.OutOfMemory("full")

    store = CheckpointStore(volume, guard=counted)
    path = CheckpointPath(RUNS[A], CheckpointKind.STATE, "one")
    with pytest.raises(errors.OutOfMemory), counted.reserve(A, 5000, replaced=volume.checkpoint(path)):
        await store.save(path, fail, base_model="tiny", tenant=A, step=0, ttl_seconds=None, overwrite=False)
    assert counted.used(A) == on_disk(volume, A) == 0


async def test_journals_snapshots_and_loaded_checkpoints_count(volume, counted):
    folder = volume.run(RUNS[A])
    counted.set_owner(RUNS[A], A)
    RunJournal.create(folder / "journal", 1)
    journal = RunJournal(
        folder / "journal", read_history(folder / "journal"), ThreadPoolExecutor(1), NO_FAILPOINTS, counted
    )
    snapshots = SnapshotStore(folder, NO_FAILPOINTS, counted)

    async def snapshot(directory: Path):
        await write(directory)
        return Counters(), []

    for seq_id in (1, 2, 3):
        await journal.append(CommandRecord(seq_id, "ForwardBackward", A, bytes(10_000)), sync=True)
        assert counted.used(A) == on_disk(volume, A) > 10_000
        await journal.rotate()
        await snapshots.save(seq_id, 0, snapshot)
        await snapshots.pin(seq_id, write)
        snapshots.unpin(await journal.drop(await asyncio.to_thread(snapshots.drop_old)))
        assert counted.used(A) == on_disk(volume, A)
    assert not (folder / "snapshots" / "1").exists()


async def test_what_is_counted_at_a_start_is_what_was_counted_before_it(volume, counted):
    store = CheckpointStore(volume, guard=counted)
    for name in ("one", "two"):
        await save(store, name)
    await save(store, "three", B)
    again = DiskGuard(volume=volume)
    again.count_all()
    assert [again.used(tenant) for tenant in (A, B)] == [counted.used(tenant) for tenant in (A, B)]


async def test_what_a_kill_left_half_done_does_not_count(volume, counted):
    half = volume.run(RUNS[A]) / "state" / ".new-0123456789"
    half.mkdir(parents=True)
    await write(half)
    again = DiskGuard(volume=volume)
    again.count_all()
    assert again.used(A) == 0


async def test_a_run_whose_folder_cannot_be_read_does_not_keep_others_from_being_counted(volume, counted, monkeypatch):
    store = CheckpointStore(volume, guard=counted)
    for tenant in (A, B):
        await save(store, "one", tenant)
    iterdir = Path.iterdir

    def failing(folder: Path):
        if folder == volume.run(RUNS[A]):
            raise OSError(errno.EIO, "no")
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", failing)
    again = DiskGuard(volume=volume)
    again.count_all()
    assert again.used(A) == 0
    assert again.used(B) == counted.used(B) > 5000


async def test_checkpoints_of_a_deleted_run_go_on_counting(volume, counted):
    store = CheckpointStore(volume, guard=counted)
    await save(store, "kept")
    folder = volume.run(RUNS[A])
    (folder / "versions" / "1").mkdir(parents=True)
    await write(folder / "versions" / "1")
    counted.measure(folder / "versions" / "1")
    before = counted.used(A)
    (folder / "versions" / "1" / layout.WEIGHTS_FILE).unlink()
    (folder / layout.RUN_FILE).rename(folder / layout.DELETED_FILE)
    counted.count(RUNS[A])
    assert 5000 < counted.used(A) == on_disk(volume, A) < before
    again = DiskGuard(volume=volume)
    again.count_all()
    assert again.used(A) == counted.used(A)
    await store.delete(CheckpointPath(RUNS[A], CheckpointKind.STATE, "kept"), Identity(A))
    layout.remove_directory(folder)
    counted.count(RUNS[A])
    assert counted.used(A) == 0


async def test_what_would_be_too_much_is_refused_with_the_figures_and_fits_after_a_deletion(volume):
    counted = DiskGuard(volume=volume, tenant_limit=12_000)
    counted.count_all()
    store, path = (
        CheckpointStore(volume, guard=counted),
        CheckpointPath(RUNS[A], CheckpointKind.STATE, "x"),
    )
    await save(store, "one")
    used = counted.used(A)
    with pytest.raises(errors.QuotaExceeded) as refused:
        counted.check_quota(A, 10_000)
    assert refused.value.metadata == {
        "quota": "volume_bytes",
        "used": str(used),
        "limit": "12000",
        "needed": "10000",
    }
    assert refused.value.retry_after is None
    assert "max_volume_bytes_per_tenant" in refused.value.message
    counted.check_quota(B, 10_000)
    with counted.reserve(A, 5000, replaced=volume.checkpoint(path)):
        with pytest.raises(errors.QuotaExceeded):
            counted.check_quota(A, 5000)
        assert counted.used(A) == used + 5000
    with counted.reserve(A, 10_000, replaced=volume.checkpoint(CheckpointPath(RUNS[A], CheckpointKind.STATE, "one"))):
        pass  # it replaces the other
    await store.delete(CheckpointPath(RUNS[A], CheckpointKind.STATE, "one"), Identity(A))
    counted.check_quota(A, 10_000)


def test_unless_told_otherwise_a_tenant_may_have_half_of_the_volume(volume, counted):
    assert counted.limit == 0
    half = DiskGuard(volume=volume, tenant_limit=None)
    half.count_all()
    assert half.limit > 0
    with pytest.raises(errors.QuotaExceeded):
        half.check_quota(A, half.limit + 1)

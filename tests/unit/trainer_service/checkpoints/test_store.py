"""Checkpoints may be overwritten, deleted or damaged at any moment, even while another call reads them."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.clocks import FakeMachine

from paceline import errors, layout, weights
from paceline.files import regular_files
from paceline.layout import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, CheckpointPath
from paceline.rpc.identity import Identity
from paceline.steady_clock import SteadyClock
from paceline.types import CheckpointKind
from trainer_service.checkpoints.store import CheckpointStore, Writer
from trainer_service.volume_files import write_checked

OWNER = Identity("team")
RUN_ID = "run-" + "0" * 32


async def write_adapter(directory: Path, value: float = 1.0) -> None:
    save_file({"a": np.full((4, 2), value, np.float32)}, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}))


async def save(
    store: CheckpointStore,
    name: str,
    *,
    overwrite: bool = False,
    write: Writer = write_adapter,
    ttl_seconds: int | None = None,
    kind: CheckpointKind = CheckpointKind.SAMPLER,
    run_id: str = RUN_ID,
    seq_id: int = 0,
) -> CheckpointPath:
    path = CheckpointPath(run_id, kind, name)
    await store.save(
        path,
        write,
        base_model="tiny",
        tenant="team",
        step=0,
        seq_id=seq_id,
        ttl_seconds=ttl_seconds,
        overwrite=overwrite,
    )
    return path


@pytest.fixture
def volume(tmp_path: Path) -> layout.Volume:
    volume = layout.Volume(tmp_path)
    volume.run(RUN_ID).mkdir(parents=True)
    write_checked(volume.run(RUN_ID) / layout.RUN_FILE, {"tenant": "team"})
    return volume


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def store(volume, machine) -> CheckpointStore:
    return CheckpointStore(volume, clock=SteadyClock(machine.machine()))


def expiry_times(store: CheckpointStore) -> dict[str, datetime | None]:
    return {checkpoint.name: checkpoint.expire_time for checkpoint in store.find_all(OWNER)}


@pytest.mark.parametrize("verb", ["link_into", "delete", "set_ttl"])
async def test_a_checkpoint_that_is_gone_is_not_found(store, volume, tmp_path, verb):
    path = await save(store, "going")
    shutil.rmtree(volume.checkpoint(path))
    arguments = {"link_into": (tmp_path,), "delete": (), "set_ttl": (60,)}
    with pytest.raises(errors.CheckpointNotFound):
        await getattr(store, verb)(path, OWNER, *arguments[verb])


async def test_a_checkpoint_that_a_killed_trainer_named_is_synced_before_its_command_is_answered(
    store, volume, monkeypatch
):
    path = await save(store, "best", seq_id=7)
    synced: list[Path] = []
    monkeypatch.setattr(layout, "sync_directory", synced.append)
    assert await store.find_made_by(path, 6) is None
    assert synced == []
    made = await store.find_made_by(path, 7)
    assert (made.path, synced) == (str(path), [volume.checkpoint(path).parent])


async def test_two_who_delete_the_same_get_one_refusal(store):
    path = await save(store, "twice")
    answers = await asyncio.gather(store.delete(path, OWNER), store.delete(path, OWNER), return_exceptions=True)
    assert sorted(type(answer) for answer in answers if answer is not None) == [errors.CheckpointNotFound]


async def test_listing_goes_on_while_checkpoints_come_and_go(store):
    async def come_and_go() -> None:
        for _ in range(50):
            await store.delete(await save(store, "moth"), OWNER)

    flight = asyncio.create_task(come_and_go())
    seen = set()
    for _ in itertools.takewhile(lambda _: not flight.done(), itertools.count()):
        seen |= {len(store.find_all(OWNER))}
        await asyncio.sleep(0)
    await flight
    assert seen <= {0, 1}


@pytest.mark.parametrize("kind", CheckpointKind)
async def test_what_is_taken_while_it_is_overwritten_is_one_save(store, tmp_path, kind):
    values = itertools.count()

    async def write(directory: Path) -> None:
        value = float(next(values))
        await write_adapter(directory, value)
        if kind is CheckpointKind.STATE:
            save_file({"moment": np.full(2, value, np.float32)}, directory / "optimizer.safetensors")

    async def overwrite() -> None:
        for _ in range(20):
            await save(store, "busy", write=write, kind=kind, overwrite=True)

    path = await save(store, "busy", write=write, kind=kind)
    overwriting = asyncio.create_task(overwrite())
    for number in itertools.takewhile(lambda _: not overwriting.done(), itertools.count()):
        target = tmp_path / f"taken-{number}"
        target.mkdir()
        await store.link_into(path, OWNER, target)
        manifest = weights.read_manifest(target)
        assert weights.sha256_of(target / WEIGHTS_FILE) == manifest.sha256
        assert weights.blake3_of(target / WEIGHTS_FILE) == manifest.model.blake3
        if kind is CheckpointKind.STATE:
            values_taken = [load_file(target / name) for name in (WEIGHTS_FILE, "optimizer.safetensors")]
            assert values_taken[0]["a"][0, 0] == values_taken[1]["moment"][0]
    await overwriting


async def test_listing_shows_a_checkpoint_all_the_time_that_it_is_overwritten(store):
    async def overwrite() -> None:
        for _ in range(20):
            await save(store, "busy", overwrite=True)

    await save(store, "busy")
    overwriting = asyncio.create_task(overwrite())
    while not overwriting.done():
        (checkpoint,) = await asyncio.to_thread(store.find_all, OWNER)
        assert checkpoint.damage == ""
    await overwriting


async def test_an_overwrite_that_fails_leaves_the_old_checkpoint_and_its_time(store, machine):
    async def write_what_cannot_be_synced(directory: Path) -> None:
        await write_adapter(directory)
        (directory / "folder").mkdir()

    await save(store, "kept")
    await save(store, "timed", ttl_seconds=1_000)
    before = expiry_times(store)
    for name in ("kept", "timed"):
        with pytest.raises(OSError, match="directory"):
            await save(store, name, overwrite=True, ttl_seconds=1, write=write_what_cannot_be_synced)
    assert expiry_times(store) == before
    machine.pass_time(60)
    assert await store.delete_expired() == []


async def test_what_overwrites_has_a_time_of_its_own(store, machine):
    await save(store, "forever", ttl_seconds=1)
    await save(store, "forever", overwrite=True)
    await save(store, "short")
    short = await save(store, "short", overwrite=True, ttl_seconds=10)
    assert expiry_times(store)["forever"] is None
    machine.pass_time(60)
    assert await store.delete_expired() == [str(short)]
    assert expiry_times(store) == {"forever": None}


@pytest.mark.parametrize("step", [1_000, -1_000])
@pytest.mark.parametrize("when", ["after the save", "before the save, and back after it"])
async def test_a_jump_of_the_wall_clock_deletes_nothing_early(store, machine, step, when):
    if when == "after the save":
        path = await save(store, "timed", ttl_seconds=60)
        machine.wall += step
    else:
        machine.wall += step
        path = await save(store, "timed", ttl_seconds=60)
        machine.wall -= step
    machine.pass_time(59)
    assert await store.delete_expired() == []
    machine.pass_time(1_001)  # no later than by either clock
    assert await store.delete_expired() == [str(path)]


@pytest.mark.parametrize("is_turned_off", [False, True])
async def test_a_time_to_live_goes_on_while_the_trainer_is_away_as_long_as_the_machine_runs(
    volume, tmp_path, machine, is_turned_off
):
    def restarted() -> tuple[CheckpointStore, SteadyClock]:
        clock = SteadyClock(machine.machine())
        clock.resume(tmp_path / "clock.json", counts_downtime=True)
        return CheckpointStore(volume, clock=clock), clock

    first, _ = restarted()
    path = await save(first, "timed", ttl_seconds=60)
    machine.pass_time(40)
    if is_turned_off:
        machine.reboot(seconds_off=1_000)
    again, clock = restarted()
    machine.pass_time(19)
    assert await again.delete_expired() == []
    machine.pass_time(1)
    assert await again.delete_expired() == ([] if is_turned_off else [str(path)])
    clock.save()
    again, _ = restarted()
    machine.pass_time(40)
    assert await again.delete_expired() == ([str(path)] if is_turned_off else [])


@pytest.mark.parametrize("text", ["", "{", "2026-12-01T00:00:00+00:00", '{"x": 3}', "\udcff"])
async def test_a_damaged_time_keeps_its_checkpoint_and_lets_others_go(store, volume, machine, text):
    damaged = volume.checkpoint(await save(store, "damaged", ttl_seconds=1))
    going = await save(store, "going", ttl_seconds=1)
    (damaged.parent / ".expires-damaged").write_text(text, errors="surrogateescape")
    machine.pass_time(60)
    assert await store.delete_expired() == [str(going)]
    assert expiry_times(store) == {"damaged": None}


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "flipped": lambda directory: _flip(directory / MANIFEST_FILE),
    "empty": lambda directory: (directory / MANIFEST_FILE).write_bytes(b""),
    "not text": lambda directory: (directory / MANIFEST_FILE).write_bytes(b"\xff"),
    "gone": lambda directory: (directory / MANIFEST_FILE).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_checkpoint_is_shown_to_its_owner_and_can_be_deleted_and_overwritten(
    store, volume, tmp_path, damage
):
    paths = [await save(store, name) for name in ("first", "second", "whole")]
    for path in paths[:2]:
        DAMAGES[damage](volume.checkpoint(path))
    (target := tmp_path / "target").mkdir()
    listed = {checkpoint.path: checkpoint for checkpoint in store.find_all(OWNER)}
    assert [bool(listed[str(path)].damage) for path in paths] == [True, True, False]
    assert store.find_all(Identity("another")) == []
    for verb in (store.delete, store.set_ttl):
        with pytest.raises(errors.CheckpointNotFound):
            await verb(paths[0], Identity("another"), *([60] if verb == store.set_ttl else []))
    with pytest.raises(errors.ChecksumMismatch):
        await store.link_into(paths[0], OWNER, target)
    with pytest.raises(errors.ChecksumMismatch):
        await store.set_ttl(paths[0], OWNER, 60)
    await store.delete(paths[0], OWNER)
    await save(store, "second", overwrite=True)
    assert {checkpoint.path: checkpoint.damage for checkpoint in store.find_all(OWNER)} == {
        str(path): "" for path in paths[1:]
    }


@pytest.mark.parametrize("damage", ["manifest", "deleted", "expired"])
async def test_a_runs_newest_state_is_the_last_in_the_order_of_its_commands_that_can_be_loaded(
    store, volume, machine, damage
):
    state = CheckpointKind.STATE
    assert (await store.newest_states.find(RUN_ID)).path == ""
    late = await save(store, "late", seq_id=3, kind=state)
    await save(store, "other", seq_id=2, kind=state)
    first = await save(store, "first", seq_id=1, kind=state)
    await save(store, "weights", seq_id=9)
    assert (await store.newest_states.find(RUN_ID)).path == str(late)
    await save(store, "first", seq_id=4, kind=state, overwrite=True, ttl_seconds=60)
    assert (await store.newest_states.find(RUN_ID)).path == str(first)
    if damage == "manifest":
        (volume.checkpoint(first) / MANIFEST_FILE).write_text("{")
        store = CheckpointStore(volume)  # as after a restart
    elif damage == "deleted":
        await store.delete(first, OWNER)
    else:
        machine.pass_time(61)
        assert await store.delete_expired() == [str(first)]
    assert (await store.newest_states.find(RUN_ID)).path == str(late)


async def test_what_lies_among_checkpoints_and_is_none_is_left_out(store, volume):
    kept = await save(store, "kept")
    folder = volume.checkpoint(kept).parent
    (folder / "file").write_text("")
    (folder / "no name").mkdir()
    (volume.runs / "run-backup" / "sampler" / "kept").mkdir(parents=True)
    assert [checkpoint.path for checkpoint in store.find_all(OWNER)] == [str(kept)]
    with pytest.raises(errors.CheckpointNotFound):
        store.find(CheckpointPath(RUN_ID, CheckpointKind.SAMPLER, "file"), OWNER)


async def test_a_checkpoint_is_its_runs_tenants_whatever_its_manifest_says(store, volume):
    path = await save(store, "mine")
    file = volume.checkpoint(path) / MANIFEST_FILE
    file.write_text(file.read_text().replace('"team"', '"teal"'))
    assert store.find_all(Identity("teal")) == []
    assert store.find(path, OWNER) == volume.checkpoint(path)
    (volume.run(RUN_ID) / layout.RUN_FILE).rename(volume.run(RUN_ID) / layout.DELETED_FILE)
    assert store.find(path, OWNER) == volume.checkpoint(path)


@pytest.fixture
def failing(monkeypatch) -> set[str]:
    """Names of folders that cannot be listed and of files that cannot be read: there are too many open files."""
    names: set[str] = set()

    def checked(function):
        def call(path, *arguments):
            if Path(path).name in names:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return function(path, *arguments)

        return call

    monkeypatch.setattr(os, "listdir", checked(os.listdir))
    monkeypatch.setattr(regular_files, "open_raw", checked(regular_files.open_raw))
    return names


@pytest.mark.parametrize("unreadable", [{"state"}, {MANIFEST_FILE}, {layout.RUN_FILE, MANIFEST_FILE}])
async def test_checkpoints_that_cannot_be_read_now_are_not_taken_for_none(store, failing, unreadable):
    path = await save(store, "best", seq_id=3, kind=CheckpointKind.STATE)
    failing |= unreadable
    for run_id in (RUN_ID, ""):
        with pytest.raises(OSError, match="Too many open files"):
            store.find_all(OWNER, run_id)
    with pytest.raises(OSError, match="Too many open files"):
        await store.newest_states.find(RUN_ID)
    failing.clear()
    assert (await store.newest_states.find(RUN_ID)).path == str(path)
    assert [checkpoint.path for checkpoint in store.find_all(OWNER)] == [str(path)]


async def test_one_checkpoint_that_cannot_be_read_hides_no_other_and_is_asked_for_again(store, volume, monkeypatch):
    await save(store, "older", seq_id=1, kind=CheckpointKind.STATE)
    newer = await save(store, "newer", seq_id=2, kind=CheckpointKind.STATE)
    damaged, open_raw = volume.checkpoint(newer) / MANIFEST_FILE, regular_files.open_raw

    def opened(path):
        if path.resolve() == damaged.resolve():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_raw(path)

    with monkeypatch.context() as patch:
        patch.setattr(regular_files, "open_raw", opened)
        for run_id in (RUN_ID, ""):
            (found,) = store.find_all(OWNER, run_id)
            assert found.name == "older"
        assert (await store.newest_states.find(RUN_ID)).seq_id == 1
    assert (await store.newest_states.find(RUN_ID)).path == str(newer)


async def test_a_folder_that_cannot_be_listed_hides_no_checkpoint_elsewhere(store, volume, failing):
    await save(store, "best", kind=CheckpointKind.STATE)
    await save(store, "weights")
    other = "run-" + "1" * 32
    volume.run(other).mkdir()
    write_checked(volume.run(other) / layout.RUN_FILE, {"tenant": "another"})
    theirs = await save(store, "theirs", run_id=other)
    failing.add("state")
    for run_id in (RUN_ID, ""):
        (found,) = store.find_all(OWNER, run_id, CheckpointKind.SAMPLER)
        assert found.name == "weights"
    failing.clear()
    failing.add("sampler")
    for run_id in (RUN_ID, ""):
        with pytest.raises(OSError, match="Too many open files"):
            store.find_all(OWNER, run_id)
    assert store.find_all(OWNER, other) == []
    failing.clear()
    (volume.run(other) / "state").symlink_to("state")  # cannot be listed either
    assert {checkpoint.name for checkpoint in store.find_all(OWNER)} == {"best", "weights"}
    (volume.run(other) / layout.RUN_FILE).unlink()  # whose it is cannot be read
    assert {checkpoint.name for checkpoint in store.find_all(OWNER)} == {"best", "weights"}
    for tenant in ("another", "team"):
        with pytest.raises(OSError, match="symbolic links"):
            store.find_all(Identity(tenant), other)
    assert store.find(theirs, Identity("team")) == volume.checkpoint(theirs)


LINKS = {
    "a file": lambda directory, secret: (directory / CONFIG_FILE).symlink_to(secret),
    "one more file": lambda directory, secret: (directory / "notes").symlink_to(secret),
    "a pipe": lambda directory, _: os.mkfifo(directory / "notes"),
}


@pytest.mark.parametrize("kind", LINKS)
async def test_what_a_checkpoint_links_to_is_neither_sent_nor_loaded(store, volume, tmp_path, kind):
    path = await save(store, "linked")
    secret, directory = tmp_path / "credential", volume.checkpoint(path)
    secret.write_bytes((directory / CONFIG_FILE).read_bytes())
    if kind == "a file":
        (directory / CONFIG_FILE).unlink()
    LINKS[kind](directory, secret)
    with pytest.raises(errors.ChecksumMismatch, match="no regular file"):
        [part async for part in store.download(path, OWNER)]
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(errors.ChecksumMismatch):
        await store.link_into(path, OWNER, target)
    assert secret.read_bytes() not in {file.read_bytes() for file in target.iterdir() if file.name != CONFIG_FILE}
    await store.delete(path, OWNER)
    assert secret.exists()


@pytest.mark.parametrize("linked", ["checkpoint", "folder"])
async def test_a_checkpoint_that_is_a_link_is_none(store, volume, tmp_path, linked):
    path = await save(store, "linked")
    directory = volume.checkpoint(path)
    moved = directory if linked == "checkpoint" else directory.parent
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CheckpointNotFound):
        store.find(path, OWNER)
    with pytest.raises(errors.CheckpointNotFound):
        [part async for part in store.download(path, OWNER)]
    assert linked == "folder" or not store.find_all(OWNER)

"""Checkpoints may be deleted at any moment, also while another call looks at them."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline import errors, layout
from paceline.layout import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, CheckpointPath
from paceline.rpc.identity import Identity
from paceline.types import CheckpointKind
from trainer_service.checkpoints.store import CheckpointStore

OWNER = Identity("team")
RUN_ID = "run-" + "0" * 32


async def write_adapter(directory: Path) -> None:
    save_file({"a": np.ones((4, 2), np.float32)}, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps({"r": 8}))


async def save(store: CheckpointStore, name: str, *, overwrite: bool = False) -> CheckpointPath:
    path = CheckpointPath(RUN_ID, CheckpointKind.SAMPLER, name)
    await store.save(
        path, write_adapter, base_model="tiny", tenant="team", step=0, ttl_seconds=None, overwrite=overwrite
    )
    return path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(layout.Volume(tmp_path))


async def test_listing_leaves_out_what_is_being_deleted(store, tmp_path):
    kept, going = await save(store, "kept"), await save(store, "going")
    for file in layout.Volume(tmp_path).checkpoint(going).iterdir():
        file.unlink()
    assert [checkpoint.path for checkpoint in store.find_all(OWNER)] == [str(kept)]


@pytest.mark.parametrize("verb", ["open", "delete", "set_ttl"])
async def test_a_checkpoint_that_goes_meanwhile_is_not_found(store, tmp_path, verb):
    path = await save(store, "going")
    (layout.Volume(tmp_path).checkpoint(path) / MANIFEST_FILE).unlink()
    arguments = (60,) if verb == "set_ttl" else ()
    with pytest.raises(errors.CheckpointNotFound):
        await getattr(store, verb)(path, OWNER, *arguments)


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

"""Versions broadcast by NCCL, with each member on its own GPU."""

import os
from contextlib import AsyncExitStack

import pytest
import torch
from support.process_groups import make_group, send

from paceline.collective.member import CHUNK_BYTES
from paceline.errors import PeerLost

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SIZES = [2] if torch.cuda.device_count() > 1 else []
"""NCCL does not accept two members on one GPU."""


async def test_two_members_on_one_gpu_are_told_so(monkeypatch):
    async with AsyncExitStack() as stack:
        with pytest.raises(PeerLost, match="GPU that another member has") as refused:
            await make_group(stack, 2, 30.0, "nccl", lambda rank: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0"))
        assert refused.value.metadata == {"missing": "1"}


@pytest.mark.parametrize("size", SIZES)
async def test_every_member_gets_each_file_and_a_lost_peer_is_an_error(tmp_path, monkeypatch, size):
    content = os.urandom(3 * CHUNK_BYTES + 12_345)
    (tmp_path / "source").write_bytes(content)
    async with AsyncExitStack() as stack:
        members = await make_group(
            stack, size, 30.0, "nccl", lambda rank: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
        )
        paths = [tmp_path / "source", tmp_path / "got"]
        for _ in range(2):
            assert await send(members, paths, len(content)) == [None] * size
            assert (tmp_path / "got").read_bytes() == content
        await members[1].stop()
        results = await send(members, paths, len(content))
        assert [type(result) for result in results] == [PeerLost] * size

"""Members of a process group meet, each on its own GPU, before NCCL is used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from paceline.collective.member import SharedGpuError, meet
from paceline.collective.process import GroupMembership


def place(rank, size):
    return GroupMembership("nccl", "127.0.0.1:0", 1, rank, size, 5.0)


def met(*gpus):
    store = dist.HashStore()
    with ThreadPoolExecutor(len(gpus)) as pool:
        others = [pool.submit(meet, store, place(rank, len(gpus)), gpu) for rank, gpu in enumerate(gpus) if rank]
        try:
            meet(store, place(0, len(gpus)), gpus[0])
        finally:
            store.set("go", "")  # releases the others, as the end of the store does
        for other in others:
            other.result()


@pytest.mark.parametrize("gpus", [("a", "b", "c"), ("", "", "")], ids=["gpus", "none"])
def test_members_on_gpus_of_their_own_or_on_none_meet(gpus):
    met(*gpus)


def test_those_on_a_gpu_that_another_has_are_named_with_what_to_do():
    with pytest.raises(SharedGpuError, match=r"ranks \[1, 3\] .*CUDA_VISIBLE_DEVICES.*group_backend=gloo") as refused:
        met("a", "a", "b", "b")
    assert refused.value.ranks == [1, 3]

"""When a collective fails on one of an engine's ranks, the rank makes up for it or ends."""

import os

import pytest
import torch
import torch.distributed as dist
from support.memory_limits import short_of_memory
from torch._C._distributed_c10d import FileStore

from paceline.errors import Internal, InvalidArgument
from trainer_service.engine.distributed.ranks import OutOfStepError, Ranks
from trainer_service.engine.distributed.sharding import Gathers


@pytest.fixture
def group(tmp_path):
    """Yield a process group of this process alone, with working collectives."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def ranks(group):
    return Ranks(rank=0, size=2)


def refuse(*_arguments, **_options):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_gather_that_there_is_no_memory_for_is_not_begun_and_is_made_up_for(group):
    gathers = Gathers()
    part, whole = torch.zeros(12 << 20), torch.empty(12 << 20)  # too large for memory that malloc already holds
    gathers.begin(with_gradient=True)  # the first pass of its kind is recorded
    gathers(whole, part, group)
    begun = group._get_sequence_number_for_group()
    gathers.begin(with_gradient=True)
    with short_of_memory(os.getpid(), 1 << 20), pytest.raises(RuntimeError, match="can't allocate memory"):
        gathers(whole, part, group)
    assert group._get_sequence_number_for_group() == begun
    gathers.complete()
    assert group._get_sequence_number_for_group() == begun + 1


def test_a_gather_that_was_begun_and_failed_ends_the_rank(group, monkeypatch):
    gathers = Gathers()
    gathers.begin(with_gradient=True)
    monkeypatch.setattr(dist, "all_gather_single", refuse)
    with pytest.raises(OutOfStepError):
        gathers(torch.empty(3), torch.zeros(3), group)


def test_a_failure_is_raised_once_the_rank_caught_up(ranks):
    caught_up = []

    def fail():
        raise InvalidArgument("is wrong.", field="data")

    with pytest.raises(InvalidArgument):
        ranks.together(fail, lambda: caught_up.append(True))
    assert caught_up


def test_a_rank_that_cannot_catch_up_ends(ranks, monkeypatch):
    gathers = Gathers()
    gathers.begin(with_gradient=True)
    gathers(torch.empty(3), torch.zeros(3), dist.group.WORLD)
    gathers.begin(with_gradient=True)
    monkeypatch.setattr(dist, "all_gather_single", refuse)
    with pytest.raises(OutOfStepError):
        ranks.together(refuse, gathers.complete)


def test_a_rank_that_cannot_tell_of_a_failure_ends(ranks, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", refuse)
    with pytest.raises(OutOfStepError):
        ranks.together(refuse)


def test_nothing_takes_a_rank_out_of_step_for_a_failed_command(ranks):
    def go_another_way():
        raise OutOfStepError("ranks disagree")

    with pytest.raises(OutOfStepError):
        ranks.together(go_another_way)
    with pytest.raises(Internal):
        ranks.together(refuse)

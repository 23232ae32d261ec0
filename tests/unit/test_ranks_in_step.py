"""Ranks of an engine when a collective fails on one of them: it is made up for, or the rank ends."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from paceline.errors import Internal, InvalidArgument
from trainer_service.engine.ranks import OutOfStepError, Ranks
from trainer_service.engine.sharding import _Gathers


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone, whose collectives run."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def ranks(group):
    return Ranks(rank=0, size=2)


def refuse(*_arguments, **_options):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_gather_that_raised_is_among_those_to_complete(group, monkeypatch):
    gathers, done = _Gathers(), []
    gather = dist.all_gather_single

    def count(output, own, **options):
        done.append(own.numel())
        return gather(output, own, **options)

    def gather_weights(size):
        gathers(torch.empty(size), torch.zeros(size), group)

    monkeypatch.setattr(dist, "all_gather_single", count)
    gathers.begin(with_gradient=True)
    for size in (3, 4, 5):
        gather_weights(size)
    done.clear()
    gathers.begin(with_gradient=True)
    gather_weights(3)
    with monkeypatch.context() as short, pytest.raises(RuntimeError, match="memory"):
        short.setattr(dist, "all_gather_single", refuse)
        gather_weights(4)
    gathers.complete()
    assert done == [3, 4, 5]


def test_a_failure_is_raised_once_the_rank_caught_up(ranks):
    caught_up = []

    def fail():
        raise InvalidArgument("is wrong.", field="data")

    with pytest.raises(InvalidArgument):
        ranks.together(fail, lambda: caught_up.append(True))
    assert caught_up


def test_a_rank_that_cannot_catch_up_ends(ranks, monkeypatch):
    gathers = _Gathers()
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

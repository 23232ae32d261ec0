"""More runs than run memory holds, on a real trainer whose processes are killed: they are restored within it."""

from __future__ import annotations

import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for

from paceline import AdamParams, Datum

pytestmark = pytest.mark.services

DATA = [Datum.from_completion(list(b"Country: Peru\nCapital:"), list(b" Lima"))]
ADAM = AdamParams(learning_rate=1e-3)
RUNS, FITTING = 6, 2
RUN_BYTES = 16 * 8192
"""Size of the weights, gradient and two moments of a rank 4 adapter of the tiny model, in float32."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    state = tmp_path_factory.mktemp("paged")
    cluster = Cluster.make(
        state,
        make_tiny_llama(state / "model"),
        PACELINE_TRAINER_RUN_MEMORY_GIB=repr((FITTING + 0.5) * RUN_BYTES / 2**30),
        PACELINE_TRAINER_SCRATCH_DIR=str(state / "scratch"),
        PACELINE_TRAINER_SNAPSHOT_COMMANDS="3",
    )
    with cluster.running(cluster.trainer, cluster.gateway):
        yield cluster


def test_runs_come_back_within_their_memory_after_engine_and_trainer_were_killed(cluster, service):
    runs = [service.create_lora_training_client(rank=4, seed=1) for _ in range(RUNS)]

    def step_all():
        for run in runs:
            run.forward_backward(DATA)
        steps = [run.optim_step(ADAM) for run in runs]
        return {(step.step, step.grad_norm) for step in (future.result() for future in steps)}

    def paged():
        return len(list((cluster.state / "scratch").rglob("trainer_state.json")))

    assert len(step_all()) == 1, "all runs are alike"
    cluster.trainer.kill_engine()
    ((step, _),) = step_all()
    assert (step, paged()) == (2, RUNS - FITTING)
    cluster.trainer.kill()
    cluster.trainer.start()
    wait_for(lambda: paged() == RUNS - FITTING)
    ((step, grad_norm),) = step_all()
    straight = service.create_lora_training_client(rank=4, seed=1)
    for _ in range(3):
        straight.forward_backward(DATA)
        expected = straight.optim_step(ADAM).result()
    assert (step, grad_norm) == (expected.step, expected.grad_norm)

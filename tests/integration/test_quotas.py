"""Quotas as tenants see them at the gateway: what is full, what is shared, and what frees space."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

import paceline
from paceline import Datum, ModelRef, SamplingParams, errors
from paceline.files.key_changes import add_key
from paceline.files.tenants_file import change_limits

pytestmark = pytest.mark.services

VOLUME_BYTES = 2 << 20
PROMPT = np.arange(1, 9)
DATUM = Datum.from_completion([1, 2, 3], [4, 5, 6])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quotas")
    cluster = Cluster.make(
        folder / "state",
        make_tiny_llama(folder / "model"),
        PACELINE_TRAINER_MAX_VOLUME_BYTES_PER_TENANT=str(VOLUME_BYTES),
        PACELINE_TRAINER_MAX_RUNS_PER_TENANT="2",
        PACELINE_SAMPLER_MAX_WAITING="16",
        PACELINE_SAMPLER_MAX_NUM_SEQS="2",
        PACELINE_SAMPLER_MAX_WAITING_TOKENS="100000",
    )
    with cluster.running():
        yield cluster


@pytest.fixture
def service(cluster):
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        yield service


@pytest.fixture(scope="module")
def other_key(cluster):
    return add_key(cluster.state / "keys.json", "bartali", "laptop")


@pytest.fixture
def other(cluster, other_key):
    with paceline.ServiceClient(cluster.address, other_key) as service:
        yield service


def quotas(service):
    return {quota.name: quota for quota in service.whoami().quotas}


def on_disk(cluster: Cluster, *run_ids: str) -> int:
    runs = Path(cluster.trainer.plan.environment["PACELINE_TRAINER_CHECKPOINT_DIR"]) / "runs"
    return sum(path.stat().st_size for run_id in run_ids for path in (runs / run_id).glob("*/**/*") if path.is_file())


def test_the_volume_is_shared_out_and_a_deletion_frees_space(cluster, service, other):
    training = service.create_lora_training_client(rank=8)
    neighbour = other.create_lora_training_client(rank=8)
    with pytest.raises(errors.QuotaExceeded) as refused:
        for number in range(1000):
            training.save_state(f"step-{number}").result()
    used = quotas(service)["volume_bytes"]
    assert refused.value.metadata["quota"] == "volume_bytes"
    assert int(refused.value.metadata["limit"]) == used.limit == VOLUME_BYTES
    assert used.used == on_disk(cluster, training.run_id) > VOLUME_BYTES / 2
    assert "delete checkpoints" in str(refused.value)
    neighbour.save_state("a").result()
    for checkpoint in service.list_checkpoints()[:2]:
        service.delete_checkpoint(checkpoint.path)
    training.save_state("again").result()
    cluster.trainer.kill()
    cluster.trainer.start()
    training.forward_backward([DATUM], "cross_entropy").result()
    assert quotas(service)["volume_bytes"].used == on_disk(cluster, training.run_id)
    assert quotas(other)["volume_bytes"].used == on_disk(cluster, neighbour.run_id)
    for training_of, owner in ((training, service), (neighbour, other)):
        owner.delete_run(training_of.run_id, delete_checkpoints=True)
    assert quotas(service)["volume_bytes"].used == 0


def test_runs_are_counted_and_the_refusal_names_the_quota(service, other):
    runs = [service.create_lora_training_client(rank=1).run_id for _ in range(2)]
    with pytest.raises(errors.TooManyRuns) as refused:
        service.create_lora_training_client(rank=1)
    assert isinstance(refused.value, errors.QuotaExceeded)
    assert refused.value.metadata == {"quota": "runs", "used": "2", "limit": "2"}
    shown = quotas(service)
    assert (shown["runs"].used, shown["runs"].limit) == (2, 2)
    assert quotas(other)["runs"].used == 0
    service.delete_run(runs.pop(), delete_checkpoints=True)
    runs.append(service.create_lora_training_client(rank=1).run_id)
    for run_id in runs:
        service.delete_run(run_id, delete_checkpoints=True)


def test_a_tenant_has_limits_of_its_own_from_its_next_call_on(cluster, service, other, other_key):
    own = {
        "runs": 1,
        "volume_bytes": 0,
        "waiting_bytes": 5000,
        "calls": 7,
        "completions": 3,
        "tokens": 50,
        "versions": 2,
    }
    tenants = cluster.state / "tenants.json"
    change_limits(tenants, "bartali", own)
    run = other.create_lora_training_client(rank=1).run_id
    with pytest.raises(errors.TooManyRuns, match="this tenant's limit `runs`") as refused:
        other.create_lora_training_client(rank=1)
    assert refused.value.metadata == {"quota": "runs", "used": "1", "limit": "1"}
    assert {name: quota.limit for name, quota in quotas(other).items() if name in own} == own
    assert quotas(service)["runs"].limit == 2
    with pytest.raises(errors.QuotaExceeded, match="this tenant's limit `tokens`"):
        _sample_at_once(cluster, other_key, 8)
    change_limits(tenants, "bartali", {}, frozenset(own))
    second = other.create_lora_training_client(rank=1).run_id
    assert quotas(other)["runs"].limit == 2
    for run_id in (run, second):
        other.delete_run(run_id, delete_checkpoints=True)


def _sample_at_once(cluster, key, number):
    """Sample as often at the same time; raise the first refusal, instead of trying again."""
    with paceline.ServiceClient(cluster.address, key, retry=paceline.RetryPolicy(budget=0)) as service:
        sampling = service.create_sampling_client(base_model=ModelRef().base)
        futures = [sampling.sample(PROMPT, sampling_params=SamplingParams(max_tokens=100)) for _ in range(number)]
        for future in futures:
            future.result()


def test_whoami_lists_all_quotas_of_all_services(service):
    shown = quotas(service)
    assert list(shown) == [
        "calls",
        "call_bytes",
        "runs",
        "volume_bytes",
        "waiting_bytes",
        "completions",
        "tokens",
        "versions",
    ]
    assert (shown["completions"].limit, shown["tokens"].limit, shown["versions"].limit) == (16, 100_000, 16)
    assert shown["waiting_bytes"].used == shown["completions"].used == shown["tokens"].used == 0


def test_a_tenant_samples_while_another_floods(service, other):
    base = ModelRef()
    flooding = True

    def flood(_):
        sampling = service.create_sampling_client(base_model=base.base)
        while flooding:
            sampling.sample(PROMPT, num_samples=4, sampling_params=SamplingParams(max_tokens=40)).result()

    with ThreadPoolExecutor(8) as threads:
        flooders = [threads.submit(flood, number) for number in range(8)]
        try:
            sampling = other.create_sampling_client(base_model=base.base)
            for _ in range(3):
                result = sampling.sample(PROMPT, num_samples=4, sampling_params=SamplingParams(max_tokens=4)).result()
                assert len(result.sequences) == 4
        finally:
            flooding = False
        for flooder in flooders:
            flooder.result()
    assert quotas(service)["completions"].used == 0


def test_an_upload_counts_and_is_refused_beyond_the_quota(service, tmp_path):
    training = service.create_lora_training_client(rank=8)
    before = quotas(service)["volume_bytes"].used
    made = service.download_checkpoint(training.save_weights_for_sampler("own").result(), tmp_path / "own")
    own = quotas(service)["volume_bytes"].used - before
    with pytest.raises(errors.QuotaExceeded) as refused:
        for number in range(1000):
            service.upload_checkpoint(training.run_id, made, f"theirs-{number}")
    assert refused.value.metadata["quota"] == "volume_bytes"
    left = quotas(service)["volume_bytes"]
    assert VOLUME_BYTES - own < left.used <= VOLUME_BYTES
    service.delete_run(training.run_id, delete_checkpoints=True)
    assert quotas(service)["volume_bytes"].used == 0

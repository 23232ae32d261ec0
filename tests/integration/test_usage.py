"""Tokens trained: each pass once, whatever is killed, by tenant, run and day, at the gateway and in the files."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.cluster import Cluster

import paceline
from paceline import AdamParams, Datum, errors
from paceline.cli import main
from paceline.files.key_changes import add_key
from paceline.files.usage_files import read_usage
from paceline.trainer.v1 import trainer_service_pb2 as pb

pytestmark = pytest.mark.services

DATUM = Datum.from_completion([1, 2, 3], [4, 5, 6])
POSITIONS = len(DATUM.model_input)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("usage")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"))
    with cluster.running():
        yield cluster


@pytest.fixture
def tenant(cluster, tmp_path):
    """A tenant of the test's own: its name, and a file with its key."""
    name = tmp_path.name
    file = tmp_path / "key"
    file.write_text(add_key(cluster.state / "keys.json", name, name))
    return name, file


@pytest.fixture
def service(cluster, tenant):
    with paceline.ServiceClient(cluster.address, tenant[1].read_text()) as service:
        yield service


def volume_of(cluster):
    return Path(cluster.trainer.plan.environment["PACELINE_TRAINER_CHECKPOINT_DIR"])


def usage(service, **request):
    transport = service.transport
    return transport.query(transport.trainer.GetUsage, pb.GetUsageRequest(**request)).result()


def trained(service):
    """Return tokens and passes by run."""
    return {one.run_id: (one.tokens, one.passes) for one in usage(service, trained_since="2026-01-01").trained}


def today():
    return datetime.now(UTC).date().isoformat()


def test_each_pass_with_a_gradient_counts_once_through_a_kill(cluster, service):
    training = service.create_lora_training_client(rank=1)
    training.forward_backward([DATUM, DATUM], "cross_entropy").result()
    training.forward([DATUM], "cross_entropy").result()
    with pytest.raises(errors.PacelineError):
        training.forward_backward([DATUM], "no-such-loss").result()
    assert trained(service) == {training.run_id: (2 * POSITIONS, 1)}
    cluster.trainer.kill()  # before or after the counts were written: both are to end the same
    cluster.trainer.start()
    training.optim_step(AdamParams()).result()
    training.forward_backward([DATUM], "cross_entropy").result()
    assert trained(service) == {training.run_id: (3 * POSITIONS, 2)}
    time_is_up = time.monotonic() + PATIENCE
    while _in_files(cluster, training.run_id) != 3 * POSITIONS:
        assert time.monotonic() < time_is_up
        time.sleep(0.05)
    cluster.trainer.kill()
    cluster.trainer.start()
    training.optim_step(AdamParams()).result()
    assert trained(service) == {training.run_id: (3 * POSITIONS, 2)}


def _in_files(cluster, run_id):
    found = [one for listed in read_usage(volume_of(cluster)).values() for one in listed]
    return sum(one.tokens for one in found if one.run_id == run_id)


def test_usage_outlives_its_run_and_is_the_tenants_alone(cluster, service):
    runs = []
    for _ in range(3):
        training = service.create_lora_training_client(rank=1)
        training.forward_backward([DATUM], "cross_entropy").result()
        runs.append(training.run_id)
    service.delete_run(runs[0], delete_checkpoints=True)
    assert trained(service) == dict.fromkeys(runs, (POSITIONS, 1))
    with paceline.ServiceClient(cluster.address, cluster.api_key) as other:
        assert trained(other).keys().isdisjoint(runs)
    pages, token = [], ""
    while not pages or token:
        reply = usage(service, trained_since=today(), page_size=1, page_token=token)
        pages.append([one.run_id for one in reply.trained])
        token = reply.next_page_token
    assert sorted(pages) == sorted([run_id] for run_id in runs)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    assert not usage(service, trained_since=tomorrow).trained
    assert not usage(service).trained


@pytest.mark.parametrize("day", ["yesterday", "2026-13-01", "2026"])
def test_what_is_no_day_is_refused(service, day):
    with pytest.raises(errors.InvalidArgument) as refused:
        usage(service, trained_since=day)
    assert refused.value.field == "trained_since"


def test_the_command_sums_up_for_a_tenant_and_for_all(cluster, service, tenant, capsys):
    name, key = tenant
    for _ in range(2):
        service.create_lora_training_client(rank=1).forward_backward([DATUM], "cross_entropy").result()

    def shown(*arguments):
        capsys.readouterr()
        assert main(["usage", *arguments]) == 0
        return capsys.readouterr().out

    own = ["--address", cluster.address, "--api-key-file", str(key)]
    by_day = json.loads(shown("--by", "day", "--json", *own))["usage"]
    assert by_day == [{"tenant": name, "day": today(), "tokens_trained": 2 * POSITIONS, "passes": 2}]
    assert len(json.loads(shown("--json", *own))["usage"]) == 2
    assert "tokens trained" in shown(*own)
    time_is_up = time.monotonic() + PATIENCE
    while by_day[0] not in json.loads(shown("--by", "day", "--json", "--volume", str(volume_of(cluster))))["usage"]:
        assert time.monotonic() < time_is_up
        time.sleep(0.05)
    assert main(["usage", "--volume", str(key.parent)]) == 1
    assert "is no checkpoint volume" in capsys.readouterr().err

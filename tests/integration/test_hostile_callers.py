"""Real services against hostile callers: every method without a key, or on another's objects, and fuzzed calls."""

from __future__ import annotations

from functools import partial

import grpc
import pytest
from support.fuzz.floods import flood_of_resets, watching
from support.fuzz.fuzz_cases import methods, path_of
from support.fuzz.fuzz_run import CONTEXT, ENOUGH_CASES, SETTINGS, Fuzz, all_refused, is_flat
from support.fuzz.valid_requests import ABOUT_NOTHING, Owned, valid_request
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

import paceline
from gateway.admission import ACCESS, Access
from paceline import errors
from paceline.files.key_changes import add_key
from paceline.layout import new_run_id
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.weights.v1 import weight_service_pb2 as weights_pb


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "state").mkdir()
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model", context=CONTEXT), **SETTINGS)
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def owned(cluster):
    """What the first tenant owns: a run, a checkpoint of its state, one for sampling, and a version."""
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        training = service.create_lora_training_client(rank=2)
        state = training.save_state("a").result().path
        sampler = training.save_weights_for_sampler("a").result().path
        training.publish_weights().result()
        yield Owned(training.run_id, state, sampler)


@pytest.fixture(scope="module")
def stranger(cluster):
    """Another tenant's key."""
    return add_key(cluster.state / "keys.json", "stranger", "stranger")


_LISTS = frozenset({"ListRuns", "ListCheckpoints", "ListVersions"})


def _call(address, method, message, *metadata):
    """Return the replies as bytes, or raise the call's typed error."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path_of(method))
        try:
            return b"".join(call(iter([message.SerializeToString()]), metadata=metadata, timeout=60))
        except grpc.RpcError as failure:
            raise error_from_rpc(failure) from None


def _bearer(key):
    return ("authorization", f"Bearer {key}")


@pytest.mark.parametrize("method", methods(), ids=path_of)
@pytest.mark.parametrize("metadata", [(), (_bearer("pk-wrong"),), (_bearer(""),)], ids=["no key", "wrong key", "empty"])
def test_no_method_answers_without_a_key(cluster, method, metadata):
    with pytest.raises(errors.InvalidApiKey):
        _call(cluster.address, method, method.input_type._concrete_class(), *metadata)


@pytest.mark.parametrize("method", [m for m in methods() if ".gateway." not in m.full_name], ids=path_of)
@pytest.mark.parametrize("credential", ["", "a wrong credential, of some length"])
def test_no_service_answers_without_the_credential(cluster, method, credential):
    place = "PACELINE_GATEWAY_SAMPLERS" if ".sampler." in method.full_name else "PACELINE_GATEWAY_TRAINER"
    address = cluster.gateway.plan.environment[place]
    with pytest.raises(errors.MissingCredential):
        _call(address, method, method.input_type._concrete_class(), *peer_metadata(credential))


@pytest.mark.parametrize("method", methods(), ids=path_of)
def test_anothers_things_look_absent(cluster, owned, stranger, method):
    if ACCESS[path_of(method)] is Access.NOBODY:
        with pytest.raises(errors.MethodNotAllowed):
            _call(cluster.address, method, weights_pb.FetchVersionRequest(), _bearer(stranger))
    elif method.name in ABOUT_NOTHING | _LISTS:
        try:
            replies = _call(cluster.address, method, valid_request(method, owned), _bearer(stranger))
        except errors.NotFound:
            replies = b""
        assert owned.run_id.encode() not in replies
    else:
        nothing = new_run_id()
        unowned = Owned(*(name.replace(owned.run_id, nothing) for name in owned.names))
        anothers, absent = (_failure(cluster, method, named, stranger) for named in (owned, unowned))
        assert anothers.replace(owned.run_id, nothing) == absent


def _failure(cluster, method, owned, key):
    """Return what a call that names something absent is told."""
    with pytest.raises(errors.NotFound) as absent:
        _call(cluster.address, method, valid_request(method, owned), _bearer(key))
    return f"{type(absent.value).__name__} {absent.value}"


_GATEWAY = "/paceline.gateway.v1.GatewayService/WhoAmI"
_HEALTH = "/grpc.health.v1.Health/Check"


@pytest.mark.parametrize(("method", "most_bytes"), [(_GATEWAY, 64 << 20), (_HEALTH, 16 << 20)], ids=["gRPC", "health"])
def test_calls_that_a_stranger_starts_and_resets_cost_little_memory_and_keep_nobody_waiting(
    cluster, method, most_bytes
):
    address = cluster.address if method is _GATEWAY else cluster.gateway.plan.health
    with grpc.insecure_channel(address) as channel:
        call = partial(channel.unary_unary(method), b"", metadata=(_bearer(cluster.api_key),), timeout=60)
        with watching(cluster.gateway.process.pid, call) as watched:
            flood_of_resets(int(address.rpartition(":")[2]), method, 50_000)
    assert watched.grown < most_bytes
    assert watched.worst < 300


async def test_fuzzed_calls_change_nothing(cluster):
    outcome = await Fuzz(cluster, seed=0).run(0, ENOUGH_CASES)
    assert not outcome.failures, "\n".join(outcome.failures[:5])
    assert sum(outcome.codes.values()) == ENOUGH_CASES
    assert outcome.trained
    assert not all_refused(outcome.accepted)
    assert is_flat(outcome.memory)

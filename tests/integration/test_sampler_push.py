"""Versions pushed to a sampler, and the files that samplers leave behind."""

from __future__ import annotations

import shutil

import grpc
import pytest
from support.patience import PATIENCE
from support.stacks.sampler_stack import sampling, until, version_ref
from support.stacks.weight_stack import chunks_of, make_version

from paceline import errors
from paceline.layout import WEIGHTS_FILE, Volume, new_run_id
from paceline.rpc.identity import PEER_TENANT
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.weights import blake3_of
from paceline.weights.v1 import weight_service_pb2 as weights_pb

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


@pytest.fixture
def pushed(model, tmp_path):
    """A manifest and its weights file, made without a trainer."""
    manifest = make_version(Volume(tmp_path / "outside"), model, RUN, 7)
    return manifest, Volume(tmp_path / "outside").version(RUN, 7) / WEIGHTS_FILE


async def _push(client, manifest, weights, blake3=None):
    parts = [pb.UpdateWeightsRequest(manifest=manifest)]
    parts += [pb.UpdateWeightsRequest(chunk=chunk) for chunk in chunks_of(weights)]
    parts.append(pb.UpdateWeightsRequest(commit=pb.Commit(blake3=blake3 or manifest.model.blake3)))
    return await _send(client, parts)


async def _send(client, parts):
    try:
        return await client.stub.UpdateWeights(iter(parts), metadata=client.metadata, timeout=PATIENCE)
    except grpc.aio.AioRpcError as failure:
        raise error_from_rpc(failure) from None


async def test_a_pushed_version_is_active_when_the_push_is_answered(client, pushed):
    service = client.be(PEER_TENANT)
    answer = await _push(service, *pushed)
    assert answer.acknowledgement.version == 7
    assert answer.acknowledgement.blake3 == pushed[0].model.blake3
    assert (await client.sample(version_ref(RUN, 7))).model == pushed[0].model
    assert (await client.sample(version_ref(RUN))).model.version == 7
    assert (await _push(service, *pushed)).acknowledgement.blake3 == pushed[0].model.blake3
    assert len(client.staged()) == 1


async def test_a_push_of_other_content_under_the_same_version_is_refused(model, client, pushed, tmp_path):
    service = client.be(PEER_TENANT)
    await _push(service, *pushed)
    other = Volume(tmp_path / "other")
    manifest = make_version(other, model, RUN, 7, seed=99)
    with pytest.raises(errors.VersionExists):
        await _push(service, manifest, other.version(RUN, 7) / WEIGHTS_FILE)
    assert (await client.sample(version_ref(RUN, 7))).model.blake3 == pushed[0].model.blake3
    assert len(client.staged()) == 1


async def test_tenants_push_to_their_own_runs_alone(model, volume, client, pushed):
    with pytest.raises(errors.RunNotFound):
        await _push(client, *pushed)
    make_version(volume, model, RUN, 1)
    assert (await _push(client, *pushed)).acknowledgement.version == 7
    claimed = weights_pb.Manifest()
    claimed.CopyFrom(pushed[0])
    claimed.tenant, claimed.model.version = "stranger", 8
    with pytest.raises(errors.RunNotFound):
        await _push(client.be("stranger"), claimed, pushed[1])
    assert sorted(await client.loaded()) == [7]


async def test_a_push_of_a_run_that_is_deleted_while_its_bytes_arrive_is_refused(
    model, volume, trainer, client, pushed
):
    trainer.announce(make_version(volume, model, RUN, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    service, (manifest, weights), before = client.be(PEER_TENANT), pushed, len(client.staged())
    call = service.stub.UpdateWeights(metadata=service.metadata, timeout=PATIENCE)
    await call.write(pb.UpdateWeightsRequest(manifest=manifest))
    await until(lambda: len(client.staged()) > before)
    shutil.rmtree(volume.run(RUN))
    trainer.tell(weights_pb.WatchVersionsResponse(run_deleted=weights_pb.RunDeleted(run_id=RUN)))
    await until(lambda: trainer.heard("release"))
    for chunk in chunks_of(weights):
        await call.write(pb.UpdateWeightsRequest(chunk=chunk))
    await call.write(pb.UpdateWeightsRequest(commit=pb.Commit(blake3=manifest.model.blake3)))
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    assert isinstance(error_from_rpc(failure.value), errors.RunNotFound)
    assert not await client.loaded()
    await until(lambda: not client.staged())


async def test_nothing_of_a_bad_push_stays(client, pushed):
    service = client.be(PEER_TENANT)
    manifest, weights = pushed
    head = pb.UpdateWeightsRequest(manifest=manifest)
    chunks = [pb.UpdateWeightsRequest(chunk=chunk) for chunk in chunks_of(weights)]
    commit = pb.UpdateWeightsRequest(commit=pb.Commit(blake3=manifest.model.blake3))
    with pytest.raises(errors.MissingField):
        await _send(service, [head, *chunks])
    with pytest.raises(errors.MissingField):
        await _send(service, [*chunks, commit])
    with pytest.raises(errors.ChecksumMismatch):
        await _send(service, [head, commit])
    with pytest.raises(errors.ChecksumMismatch):
        await _push(service, manifest, weights, blake3="0" * 64)
    chunks[0].chunk.crc32c ^= 1
    with pytest.raises(errors.ChecksumMismatch):
        await _send(service, [head, *chunks, commit])
    wrong = weights_pb.Manifest()
    wrong.CopyFrom(manifest)
    wrong.tensors[0].name = "another"
    with pytest.raises(errors.InvalidShape):
        await _push(service, wrong, weights)
    wrong.CopyFrom(manifest)
    wrong.adapter_config = b"{}"
    with pytest.raises(errors.InvalidArgument, match=r"adapter_config\.r: is missing"):
        await _push(service, wrong, weights)
    assert not await client.loaded()
    assert not client.staged()


async def test_an_adapter_that_is_no_numbers_is_refused_by_the_name_of_the_tensor(client, pushed):
    manifest, weights = pushed
    tensor = manifest.tensors[1]
    content = bytearray(weights.read_bytes())
    content[tensor.offset : tensor.offset + 4] = b"\0\0\xc0\x7f"
    weights.write_bytes(content)
    manifest.model.blake3 = blake3_of(weights)
    with pytest.raises(errors.NonFinite) as failure:
        await _push(client.be(PEER_TENANT), manifest, weights)
    assert failure.value.field == tensor.name
    assert not await client.loaded()
    assert not client.staged()


async def test_staging_directories_of_dead_samplers_are_removed_and_those_of_living_ones_are_not(
    model, volume, port, tmp_path
):
    make_version(volume, model, RUN, 1)
    dead = tmp_path / "staging" / "paceline-sampler-dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    async with sampling(model, port, tmp_path) as first, sampling(model, port, tmp_path, sampler_id="second"):
        await first.sample(version_ref(RUN, 1))
        assert not dead.exists()
        assert len(first.staged()) == 1
    assert not list((tmp_path / "staging").iterdir())

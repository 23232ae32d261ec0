"""A sampler whose engine is rebuilt for each whole model that it serves."""

from __future__ import annotations

import asyncio
import shutil
import threading

import grpc
import pytest
from support.models.model_versions import RUN, announce, close, expected, make_model_version, publish_and_check
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.sampler_stack import PROMPT, base_ref, sampling, stream_request, tokens, until, version_ref
from support.stacks.weight_stack import BASE, make_version

from paceline import codec, errors
from paceline.layout import MODEL_FILE, new_run_id
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import ModelRef
from paceline.types.v1 import model_pb2
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from sampler_service.engine.hf import engine as hf_engine

pytest_plugins = ["support.stacks.sampler_fixtures"]


@pytest.fixture
async def client(model, port, tmp_path):
    async with sampling(model, port, tmp_path, bridge="restart") as sampler:
        yield sampler


async def test_an_announced_model_is_served_and_acknowledged_and_gives_way_to_the_next(model, volume, trainer, client):
    for version in (1, 2):
        await publish_and_check(volume, trainer, client, version)
        assert await client.is_ready()
    assert list(await client.loaded()) == [2]
    assert [(held.run_id, held.version) for held in trainer.heard("release")] == [(RUN, 1)]


async def test_models_are_brought_on_demand_and_the_base_model_comes_back(model, volume, client):
    make_model_version(volume, 1)
    first, _ = await client.logprobs(version_ref(RUN, 1))
    base, served = await client.logprobs(base_ref())
    assert close(first, expected(volume.version(RUN, 1)))
    assert close(base, expected(model))
    assert served.run_id == ""
    with pytest.raises(errors.VersionNotFound):
        await client.logprobs(version_ref(RUN, 9))


async def test_requests_in_flight_end_on_their_model_and_those_that_come_meanwhile_wait(volume, trainer, client):
    make_model_version(volume, 1)
    stream = client.stub.SampleStream(stream_request(base_ref(), max_tokens=200), metadata=client.metadata)
    first = await stream.read()
    waiting = [asyncio.create_task(client.sample(version_ref(RUN, 1))) for _ in range(3)]
    behind = asyncio.create_task(client.sample(base_ref()))
    count, served = len(first.tokens), {first.model.version}
    while (message := await stream.read()) is not grpc.aio.EOF:
        assert not any(task.done() for task in waiting)
        count, served = count + len(message.tokens), served | {message.model.version}
    assert (count, served) == (200, {0})
    assert {(await task).model.version for task in waiting} == {1}
    assert (await behind).model.version == 0


async def test_a_model_that_does_not_load_leaves_the_one_before_it_serving(volume, trainer, client):
    announce(volume, trainer, make_model_version(volume, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    before, _ = await client.logprobs(version_ref(RUN, 1))
    announce(volume, trainer, make_model_version(volume, 2, model_type="unknown"))
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert (refusal.version, refusal.reason) == (2, "MODEL_NOT_LOADABLE")
    assert (await client.logprobs(version_ref(RUN, 1)))[0] == before
    with pytest.raises(errors.ModelNotLoadable):
        await client.sample(version_ref(RUN, 2))
    assert await client.is_ready()
    announce(volume, trainer, make_model_version(volume, 3))
    await until(lambda: len(trainer.heard("acknowledgement")) == 2)
    assert (await client.sample(version_ref(RUN))).model.version == 3


@pytest.mark.parametrize("kind", ["replaced", "removed"])
async def test_files_that_are_replaced_while_they_are_loaded_are_not_served(
    kind, model, volume, trainer, client, monkeypatch, tmp_path
):
    load = hf_engine.load

    def load_late(options):
        if options.model_path.parent.name == "versions":
            moved = options.model_path.rename(tmp_path / "moved")
            if kind == "replaced":
                shutil.copytree(moved, options.model_path)
                make_tiny_llama(options.model_path, seed=7)
        return load(options)

    monkeypatch.setattr(hf_engine, "load", load_late)
    announce(volume, trainer, make_model_version(volume, 1))
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert (refusal.version, refusal.reason) == (1, "CHECKSUM_MISMATCH")
    assert close((await client.logprobs(base_ref()))[0], expected(model))
    monkeypatch.setattr(hf_engine, "load", load)
    announce(volume, trainer, make_model_version(volume, 2))
    await until(lambda: trainer.heard("acknowledgement"))
    assert close((await client.logprobs(version_ref(RUN, 2)))[0], expected(volume.version(RUN, 2)))


async def test_a_model_whose_run_is_deleted_while_it_is_loaded_is_not_served(
    model, volume, trainer, client, monkeypatch
):
    load, is_loading, may_load = hf_engine.load, threading.Event(), threading.Event()

    def load_late(options):
        if options.model_path.parent.name == "versions":
            is_loading.set()
            may_load.wait(PATIENCE)
        return load(options)

    monkeypatch.setattr(hf_engine, "load", load_late)
    announce(volume, trainer, make_model_version(volume, 1))
    asked = asyncio.create_task(client.logprobs(version_ref(RUN, 1)))
    await until(is_loading.is_set)
    trainer.tell(weights_pb.WatchVersionsResponse(run_deleted=weights_pb.RunDeleted(run_id=RUN)))
    absent = make_model_version(volume, 1, new_run_id())
    shutil.rmtree(volume.run(absent.model.run_id))
    announce(volume, trainer, absent)
    await until(lambda: trainer.heard("refusal"))  # so it has heard of the deletion before
    may_load.set()
    with pytest.raises(errors.RunNotFound):
        await asked
    assert not await client.loaded()
    assert not trainer.heard("acknowledgement")
    assert close((await client.logprobs(base_ref()))[0], expected(model))


async def test_a_model_of_another_shape_is_refused(volume, trainer, client):
    announce(volume, trainer, make_model_version(volume, 1, max_position_embeddings=64))
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert refusal.reason == "MODEL_NOT_LOADABLE"
    assert (await client.sample(base_ref())).model.version == 0


@pytest.mark.parametrize("file", [MODEL_FILE, "config.json"])
async def test_damaged_files_are_refused_before_anything_ends(volume, trainer, client, file):
    manifest = make_model_version(volume, 1)
    path = volume.version(RUN, 1) / file
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    announce(volume, trainer, manifest)
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert refusal.reason == "CHECKSUM_MISMATCH"


async def test_adapters_belong_to_the_base_model_and_are_refused(model, volume, trainer, client):
    announce(volume, trainer, make_version(volume, model, RUN, 1))
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert refusal.reason == "UNIMPLEMENTED"


async def test_anothers_model_looks_absent_whether_it_is_loaded_or_not(volume, client):
    make_model_version(volume, 1)
    stranger = client.be("stranger")
    with pytest.raises(errors.RunNotFound):
        await stranger.sample(version_ref(RUN, 1))
    await client.sample(version_ref(RUN, 1))
    with pytest.raises(errors.RunNotFound):
        await stranger.sample(version_ref(RUN, 1))


async def test_the_model_of_a_deleted_run_is_nobodys(volume, trainer, client):
    announce(volume, trainer, make_model_version(volume, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    await asyncio.to_thread(lambda: [path.unlink() for path in volume.version(RUN, 1).iterdir()])
    trainer.tell(weights_pb.WatchVersionsResponse(run_deleted=weights_pb.RunDeleted(run_id=RUN)))
    await until(lambda: trainer.heard("release"))
    with pytest.raises(errors.NotFound):
        await client.sample(version_ref(RUN, 1))
    assert (await client.sample(base_ref())).model == model_pb2.ServedModel(base_model=BASE)


async def test_a_version_that_a_newer_one_overtook_is_not_built(volume, trainer, client):
    stream = client.stub.SampleStream(stream_request(base_ref(), max_tokens=200), metadata=client.metadata)
    await stream.read()
    for version in (1, 2, 3):
        announce(volume, trainer, make_model_version(volume, version))
    while await stream.read() is not grpc.aio.EOF:
        pass
    await until(lambda: [ack for ack in trainer.heard("acknowledgement") if ack.version == 3])
    assert {refusal.reason for refusal in trainer.heard("refusal")} <= {"ENGINE_UNAVAILABLE"}
    assert (await client.sample(version_ref(RUN))).model.version == 3


async def test_only_the_model_that_is_there_is_scored_for_the_trainer(model, volume, trainer, client):
    """Scoring another model would mean loading it, and sampling requests would wait."""
    make_model_version(volume, 1)
    announce(volume, trainer, make_model_version(volume, 2))
    await until(lambda: trainer.heard("acknowledgement"))
    for ref in (ModelRef(), ModelRef(run_id=RUN, version=1), ModelRef(run_id=RUN, version=2)):
        probe = weights_pb.Probe(
            model=codec.model_ref_to_proto(ref),
            tokens=tokens(PROMPT),
            logprobs=codec.tensor_to_proto(expected(volume.version(RUN, 2)).numpy()),
            dtype="float32",
        )
        trainer.tell(weights_pb.WatchVersionsResponse(probe=probe))
    (agreement,) = await until(lambda: trainer.heard("agreement"))
    assert (agreement.model.version, agreement.refusal) == (2, "")
    assert (await client.sample(version_ref(RUN))).model.version == 2
    assert (len(trainer.heard("agreement")), len(trainer.heard("acknowledgement"))) == (1, 1)


async def test_the_one_model_is_never_unloaded_by_hand(client):
    info = await client.call("GetServerInfo", pb.GetServerInfoRequest())
    assert info.bridge == "restart"
    with pytest.raises(errors.Unsupported):
        await client.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(new_run_id(), 1)))

"""What tenants change about their runs without training them: metadata, uploaded checkpoints; and what they see."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for
from support.stacks.warm_trainer import WarmRun

import paceline
from paceline import CheckpointKind, Datum, errors
from paceline.files.key_changes import add_key
from paceline.trainer.v1 import trainer_service_pb2 as pb

pytestmark = pytest.mark.services
DATUM = Datum.from_completion([1, 2, 3], [4, 5, 6])
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"), PACELINE_TRAINER_READER_SECONDS="2")
    with cluster.running():
        yield cluster


@pytest.fixture
def other(cluster):
    with paceline.ServiceClient(cluster.address, other_key(cluster)) as service:
        yield service


def other_key(cluster):
    """Return the key of another tenant, which is made at the first call."""
    file = cluster.state / "other_key"
    if not file.exists():
        file.write_text(add_key(cluster.state / "keys.json", "bartali", "laptop"))
    return file.read_text()


@pytest.fixture
def training(service):
    training = service.create_lora_training_client(rank=2, user_metadata={"name": "first", "kept": "yes"})
    yield training
    service.delete_run(training.run_id, delete_checkpoints=True)


@pytest.fixture
def adapter(service, training, tmp_path):
    """The directory of an adapter for the run, which is not the run's own."""
    trained = service.create_lora_training_client(rank=2)
    trained.forward_backward([DATUM], "cross_entropy")
    trained.optim_step(paceline.AdamParams(learning_rate=1e-2)).result()
    path = trained.save_weights_for_sampler("made").result().path
    directory = service.download_checkpoint(path, tmp_path / "made")
    service.delete_run(trained.run_id, delete_checkpoints=True)
    return directory


def test_metadata_is_set_and_removed_and_nothing_else_changes(service, training):
    before = training.get_info()
    changed = service.update_run(training.run_id, {"name": "second", "new": "1"}, ["kept", "absent"])
    assert changed.user_metadata == {"name": "second", "new": "1"}
    assert service.update_run(training.run_id) == training.get_info() == changed
    assert (changed.last_seq_id, changed.create_time) == (before.last_seq_id, before.create_time)


def test_metadata_beyond_the_bounds_of_a_new_run_is_refused_whole(service, training):
    with pytest.raises(errors.OutOfRange, match="64"):
        service.update_run(training.run_id, {str(number): "" for number in range(63)})
    with pytest.raises(errors.OutOfRange):
        service.update_run(training.run_id, {"name": "x" * 1025})
    with pytest.raises(errors.InvalidArgument, match="both set and removed"):
        service.update_run(training.run_id, {"name": "x"}, ["name"])
    assert training.get_info().user_metadata == {"name": "first", "kept": "yes"}


def test_another_tenants_run_looks_absent(other, training, adapter):
    with pytest.raises(errors.RunNotFound):
        other.update_run(training.run_id, {"name": "mine"})
    with pytest.raises(errors.RunNotFound):
        other.upload_checkpoint(training.run_id, adapter, "mine")


def test_a_run_says_its_bytes_and_when_it_was_used(cluster, service, training):
    begun, created = datetime.now(UTC), training.get_info()
    training.save_state("a").result()
    after = training.get_info()
    folder = cluster.state / "checkpoints" / "runs" / training.run_id
    assert after.volume_bytes == sum(file.stat().st_size for file in folder.glob("*/**/*") if file.is_file())
    assert after.volume_bytes > created.volume_bytes
    assert created.last_use_time < begun < after.last_use_time
    assert [run for run in service.list_runs() if run.run_id == after.run_id] == [after]


def test_what_was_changed_survives_a_kill(fresh_trainer):
    assert fresh_trainer.start()
    with fresh_trainer.connect() as stub:
        run = WarmRun(stub)
        run.step()
        run.call("AttachRun", pb.AttachRunRequest(run_id=run.run_id, request_id="again"))
        changed = run.call(
            "UpdateRun", pb.UpdateRunRequest(run_id=run.run_id, set={"name": "kept"}, remove=["purpose"])
        )
        fresh_trainer.kill()
        assert fresh_trainer.start()
        found = run.get()
        assert found.user_metadata == changed.run.user_metadata == {"name": "kept"}
        assert found.last_use_time == changed.run.last_use_time


def test_a_trainer_that_stops_writes_when_runs_were_used(fresh_trainer):
    assert fresh_trainer.start()
    with fresh_trainer.connect() as stub:
        run = WarmRun(stub)
        run.step()
        used = run.get().last_use_time
        fresh_trainer.service.stop()
        assert fresh_trainer.service.wait(60)
        assert fresh_trainer.start()
        assert run.get().last_use_time == used


def test_an_uploaded_adapter_is_a_checkpoint_that_the_run_loads(service, training, adapter, tmp_path):
    made = service.upload_checkpoint(training.run_id, adapter, "theirs", ttl_seconds=3600)
    assert (made.kind, made.name, made.step) == (CheckpointKind.SAMPLER, "theirs", 0)
    assert made.expire_time > datetime.now(UTC)
    copy = service.download_checkpoint(made, tmp_path / "copy")
    assert all((copy / name).read_bytes() == (adapter / name).read_bytes() for name in (WEIGHTS, CONFIG))
    training.load_state(made.path).result()
    loaded = service.download_checkpoint(training.save_weights_for_sampler("loaded").result(), tmp_path / "loaded")
    theirs, ours = load_file(adapter / WEIGHTS), load_file(loaded / WEIGHTS)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    with pytest.raises(errors.CheckpointExists):
        service.upload_checkpoint(training.run_id, adapter, "theirs")
    assert service.upload_checkpoint(training.run_id, adapter, "theirs", overwrite=True).expire_time is None


def test_the_base_models_own_weights_are_left_out(service, training, adapter, tmp_path):
    tensors = load_file(adapter / WEIGHTS)
    save_file({**tensors, "base_model.model.lm_head.base_layer.weight": np.ones((4, 4), np.float32)}, adapter / WEIGHTS)
    made = service.upload_checkpoint(training.run_id, adapter, "clean")
    assert load_file(service.download_checkpoint(made, tmp_path / "copy") / WEIGHTS).keys() == tensors.keys()


def _with_rank(directory, rank):
    settings = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**settings, "r": rank}))


def _with_nan(directory):
    tensors = load_file(directory / WEIGHTS)
    name = next(iter(tensors))
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda directory: _with_rank(directory, 3), errors.CheckpointMismatch),
        (_with_nan, errors.NonFinite),
        (lambda directory: (directory / CONFIG).unlink(), errors.CheckpointMismatch),
        (lambda directory: (directory / CONFIG).write_text("{"), errors.PacelineError),
        (lambda directory: (directory / CONFIG).write_bytes(b" " * ((1 << 20) + 1)), errors.OutOfRange),
        (lambda directory: (directory / WEIGHTS).write_bytes(b"x" * 100), errors.CheckpointMismatch),
        (
            lambda directory: save_file({"a": np.zeros(8 << 20, np.float32)}, directory / WEIGHTS),
            errors.OutOfRange,
        ),
    ],
    ids=["rank", "nan", "no config", "config not JSON", "large config", "weights unreadable", "large weights"],
)
def test_what_is_no_adapter_of_the_run_is_refused_and_leaves_nothing(cluster, service, training, adapter, spoil, error):
    spoil(adapter)
    with pytest.raises(error):
        service.upload_checkpoint(training.run_id, adapter, "bad")
    assert service.list_checkpoints(training.run_id) == []
    folder = cluster.state / "checkpoints" / "runs" / training.run_id / "sampler"
    assert not folder.exists() or list(folder.iterdir()) == []


def header(training):
    return pb.UploadCheckpointRequest(header=pb.UploadHeader(run_id=training.run_id, name="bad"))


def file(name, size, sha256=""):
    return pb.UploadCheckpointRequest(file=pb.UploadedFile(name=name, size_bytes=size, sha256=sha256))


def data(content):
    return pb.UploadCheckpointRequest(data=content)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([], errors.MissingField),
        ([file(CONFIG, 1)], errors.MissingField),
        ([header], errors.MissingField),
        ([header, data(b"x")], errors.InvalidArgument),
        ([header, file("model.bin", 1)], errors.InvalidArgument),
        ([header, file(CONFIG, 3), data(b"{}"), file(CONFIG, 2)], errors.ChecksumMismatch),
        ([header, file(CONFIG, 2), data(b"{} ")], errors.ChecksumMismatch),
        ([header, file(CONFIG, 2, "0" * 64), data(b"{}")], errors.ChecksumMismatch),
        ([header, file(CONFIG, 2 << 20)], errors.OutOfRange),
    ],
    ids=["nothing", "no header", "no files", "no file", "another file", "short", "long", "checksum", "large"],
)
def test_an_upload_that_breaks_the_order_of_its_parts_is_refused(service, training, parts, error):
    sent = [part(training) if callable(part) else part for part in parts]

    async def send():
        async def stream():
            for part in sent:
                yield part

        def call(request, **given):
            return service.transport.trainer.UploadCheckpoint(stream(), **given)

        await service.transport.call(call, pb.UploadCheckpointRequest(), "training")

    with pytest.raises(error):
        service.transport.submit(send()).result()
    assert service.list_checkpoints(training.run_id) == []


def test_an_upload_that_falls_silent_is_given_up(cluster, service, training):
    async def send():
        call = service.transport.trainer.UploadCheckpoint(metadata=[("authorization", f"Bearer {cluster.api_key}")])
        await call.write(header(training))
        return await call.code()

    code = service.transport.submit(send()).result()
    assert code.name == "RESOURCE_EXHAUSTED"


def test_the_trainer_tells_which_sampler_holds_which_of_the_callers_versions(service, other, training):
    def watchers(client):
        request = pb.GetServerInfoRequest()
        return client.transport.query(client.transport.trainer.GetServerInfo, request).result().watchers

    training.publish_weights(wait_for="all").result()
    training.publish_weights(wait_for="all").result()
    (mine,) = wait_for(lambda: [one for one in watchers(service) if len(one.versions) > 1])
    shown = [(one.run_id, one.version, one.newest, one.acknowledged) for one in mine.versions]
    assert shown == [(training.run_id, 1, False, True), (training.run_id, 2, True, True)]
    assert [list(one.versions) for one in watchers(other)] == [[]]

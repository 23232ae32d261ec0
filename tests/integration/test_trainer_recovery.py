"""A trainer whose engine or machine fails waits, retries, and loses nothing."""

import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from support.patience import PATIENCE
from support.stacks.cluster import wait_for
from support.stacks.warm_trainer import SERVICE, WarmRun

from paceline import codec, errors
from paceline.layout import new_run_id
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Datum
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceStub

pytestmark = pytest.mark.services

ADAMW = pb.AdamwParams(learning_rate=1e-2)


@pytest.fixture
def trainer(fresh_trainer):
    return fresh_trainer


def test_an_engine_that_dies_again_and_again_while_a_run_is_replayed_costs_it_nothing(trainer):
    assert trainer.start()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        answers = [run.step() for _ in range(3)]
        trainer.kill()
        trainer.start(failpoints="engine_OptimStep:2+")
        wait_for(lambda: trainer.text().count("engine died while a run was restored") >= 3, 120, trainer.text)
        trainer.kill()
        assert trainer.start()
        found = run.get()
        assert (found.step, found.state) == (3, pb.RUN_STATE_READY)
        run.seq_id = 4
        assert run.step() == answers[2]
        assert run.step().step == 4


def test_a_run_that_is_replayed_is_shown_as_it_was_before(trainer):
    assert trainer.start()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        for _ in range(10):
            run.step()
        trainer.kill_engine()
        seen = set()
        wait_for(lambda: seen.add(run.get().step) or "run restored" in trainer.text(), 120, trainer.text)
        assert seen == {10}
        assert run.step().step == 11


def test_runs_are_restored_into_each_engine_whether_or_not_somebody_waits_for_them(trainer):
    assert trainer.start()
    with trainer.connect() as stub:
        runs = [WarmRun(stub, f"run-{number}") for number in range(4)]
        for run in runs:
            run.step()
        restored = 0
        for _ in range(2):
            trainer.kill_engine()
            assert runs[0].step()  # the oldest, which would be the last
            restored += len(runs)
            wait_for(lambda: trainer.text().count("run restored") == restored, 120, trainer.text)  # noqa: B023
        assert [run.get().step for run in runs] == [3, 1, 1, 1]


def test_a_trainer_that_was_stopped_replays_nothing_and_continues_where_it_was(trainer):
    assert trainer.start()
    with trainer.connect() as stub:
        stopped, other = WarmRun(stub, "stopped"), WarmRun(stub, "other")
        for run in (stopped, other):
            run.step()
            run.publish()
            run.forward_backward()
        expected = other.send("OptimStep", pb.OptimStepRequest, adamw=ADAMW)
        trainer.service.stop()
        assert trainer.service.wait(PATIENCE)
        assert trainer.start()
        wait_for(lambda: trainer.text().count("run restored") == 2, 120, trainer.text)
        assert trainer.text().count('"replayed": 0') == 2
        update = stopped.send("OptimStep", pb.OptimStepRequest, adamw=ADAMW)
        assert (update.step, update.grad_norm) == (expected.step, expected.grad_norm)
        assert stopped.publish().version == 2


def test_a_run_names_its_newest_state_checkpoint_that_exists_also_after_a_restart_and_once_it_is_lost(trainer):
    assert trainer.start()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        assert run.get().latest_state_checkpoint == ""
        older, newer = run.save("older").path, run.save("newer").path
        assert run.get().latest_state_checkpoint == newer
        run.call("DeleteCheckpoint", pb.DeleteCheckpointRequest(path=newer))
        assert run.get().latest_state_checkpoint == older
        run.step()
        trainer.kill()
        assert trainer.start()
        assert run.step().step == 2
        (listed,) = run.call("ListRuns", pb.ListRunsRequest()).runs
        assert listed.latest_state_checkpoint == run.get().latest_state_checkpoint == older
        trainer.kill()
        shutil.rmtree(trainer.volume / "runs" / run.run_id / "journal")
        assert trainer.start()
        for expected in (older, ""):
            with pytest.raises(errors.RunStateLost) as caught:
                run.forward_backward()
            assert caught.value.metadata["checkpoint"] == run.get().latest_state_checkpoint == expected
            if expected:
                run.call("DeleteCheckpoint", pb.DeleteCheckpointRequest(path=expected))


@contextmanager
def unlistable(folder):
    """Make a folder impossible to list for the block."""
    aside = folder.rename(folder.with_name(".aside"))
    folder.symlink_to(folder.name)
    yield
    folder.unlink()
    aside.rename(folder)


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_an_error_to_try_again_and_not_an_empty_one(trainer):
    def ask():
        requests = [pb.GetRunRequest(run_id=run.run_id), pb.ListRunsRequest(), pb.ListCheckpointsRequest()]
        requests.append(pb.ListCheckpointsRequest(run_id=run.run_id))
        if is_lost:
            requests.append(pb.OptimStepRequest(run_id=run.run_id, seq_id=run.seq_id + 1, adamw=ADAMW))
        for request in requests:
            with pytest.raises(grpc.RpcError) as caught:
                getattr(stub, type(request).__name__.removesuffix("Request"))(request, timeout=PATIENCE)
            error = error_from_rpc(caught.value)
            assert isinstance(error, errors.EngineUnavailable)
            assert "cannot be read at the moment (Too many levels of symbolic links)" in error.message

    assert trainer.start()
    with trainer.connect() as stub:
        run, is_lost = WarmRun(stub), False
        run.step()
        kept = run.save("kept").path
        weights = run.save("weights", pb.CHECKPOINT_KIND_SAMPLER).path
        trainer.service.stop()  # with a snapshot
        assert trainer.service.wait(PATIENCE)
        assert trainer.start()
        wait_for(lambda: "run restored" in trainer.text(), 120, trainer.text)
        folder = trainer.volume / "runs" / run.run_id
        with unlistable(folder / "state"):
            ask()
            reply = run.send("LoadCheckpoint", pb.LoadCheckpointRequest, path=weights)
            assert reply.run.run_id == run.run_id  # what is done is not refused
            attached = run.call("AttachRun", pb.AttachRunRequest(run_id=run.run_id, request_id="another"))
            assert attached.attachment == 1  # nor does that keep anybody from training
        assert run.get().latest_state_checkpoint == kept
        listed = run.call("ListCheckpoints", pb.ListCheckpointsRequest(run_id=run.run_id)).checkpoints
        assert {checkpoint.path for checkpoint in listed} == {kept, weights}
        trainer.kill()
        shutil.rmtree(folder / "journal")
        with unlistable(folder / "state"):
            assert trainer.start()
            is_lost = True
            ask()
        restored = f"paceline://{run.run_id}/state/restored-4"
        wait_for(lambda: run.get().latest_state_checkpoint == restored, 60, trainer.text)
        with pytest.raises(errors.RunStateLost) as caught:
            run.forward_backward()
        assert caught.value.metadata["checkpoint"] == restored


def test_an_engine_that_cannot_be_started_is_tried_again_and_the_service_is_not_ready_meanwhile(trainer):
    assert trainer.start()
    with (
        trainer.connect() as stub,
        grpc.insecure_channel(f"127.0.0.1:{trainer.health}") as channel,
    ):
        health = HealthStub(channel)

        def is_serving():
            status = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60).status
            return status == health_pb2.HealthCheckResponse.SERVING

        run = WarmRun(stub)
        answer = run.step()
        assert is_serving()
        limits = resource.prlimit(trainer.service.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(trainer.service.pid, resource.RLIMIT_NOFILE, (8, limits[1]))  # below what it has open
        trainer.kill_engine()
        wait_for(lambda: trainer.text().count("engine not started") >= 2, 120, trainer.text)
        assert not is_serving()
        resource.prlimit(trainer.service.pid, resource.RLIMIT_NOFILE, limits)
        wait_for(is_serving, 120, trainer.text)
        run.seq_id = 0
        assert run.step() == answer
        assert run.step().step == 2


def test_runs_are_restored_one_after_the_other_where_memory_holds_one_journal(trainer):
    assert trainer.start()
    with trainer.connect() as stub:
        runs = [WarmRun(stub, f"run-{number}") for number in range(3)]
        answers = [run.step() for run in runs]
        trainer.kill()
        assert trainer.start(max_replay_bytes=1)
        for run, answer in zip(runs, answers, strict=True):
            run.seq_id = 0
            assert run.step() == answer
            assert run.step().step == 2


def test_a_command_that_is_refused_as_it_comes_costs_no_disk_and_keeps_its_place(trainer):
    def on_disk():
        return sum(path.stat().st_size for path in trainer.volume.glob("runs/*/journal/*"))

    wrong = codec.datum_to_proto(Datum.from_completion([1, 2], [-1] * 500))
    assert trainer.start()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        run.step()
        before = on_disk()
        for _ in range(2):
            for _ in range(50):
                with pytest.raises(errors.TokenOutOfRange) as caught:
                    run.send("ForwardBackward", pb.ForwardBackwardRequest, data=[wrong] * 20, loss_fn="cross_entropy")
                assert caught.value.field == "data[0].model_input"
            assert on_disk() - before < 100 * 2048
            assert run.step()
            trainer.kill()
            assert trainer.start()
            run.seq_id = 2
        assert run.get().step == 2


def test_bytes_on_the_volume_are_counted_rightly_after_a_kill_in_the_middle_of_a_save(trainer):
    def on_disk():
        paths = (*trainer.volume.glob("runs/*/*/**/*"), *trainer.volume.glob("runs/*/*.jsonl"))
        return sum(path.stat().st_size for path in paths if path.is_file())

    def counted(stub):
        return {quota.name: quota.used for quota in stub.GetUsage(pb.GetUsageRequest()).quotas}["volume_bytes"]

    assert trainer.start(failpoints="before_checkpoint:2")
    with trainer.connect() as stub, ThreadPoolExecutor(1) as thread:
        run = WarmRun(stub)
        run.step()
        run.save("first")
        wait_for(lambda: counted(stub) == on_disk() > 0, PATIENCE)  # metrics are written in the background
        saving = thread.submit(run.save, "second")
        assert trainer.service.wait(PATIENCE)
        assert list(trainer.volume.glob("runs/*/state/.new-*")), "it was not killed during the save"
        assert trainer.start()
        saving.result()
        wait_for(lambda: counted(stub) == on_disk(), PATIENCE)
        run.call("DeleteCheckpoint", pb.DeleteCheckpointRequest(path=run.save("third").path))
        wait_for(lambda: counted(stub) == on_disk(), PATIENCE)
        run.delete(checkpoints=True)
        assert counted(stub) == on_disk() == 0


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_sampler_that_was_away_is_told_after_a_restart_which_runs_were_deleted(trainer, checkpoints):
    assert trainer.start()
    with trainer.connect() as stub:
        kept, deleted = WarmRun(stub, "kept"), WarmRun(stub, "deleted")
        deleted.save("one")
        deleted.delete(checkpoints=checkpoints)
    trainer.kill()
    assert trainer.start()
    said, runs = SimpleQueue(), [kept.run_id, deleted.run_id, new_run_id()]  # the last is of another trainer
    held = [weights_pb.HeldVersion(run_id=run_id, version=1) for run_id in runs]
    said.put(weights_pb.WatchVersionsRequest(hello=weights_pb.Hello(sampler_id="one", held=held)))
    with grpc.insecure_channel(f"127.0.0.1:{trainer.port}") as channel:
        watch = WeightServiceStub(channel).WatchVersions(
            iter(said.get, None), timeout=PATIENCE, metadata=peer_metadata("")
        )
        assert next(watch).HasField("welcome")
        assert next(watch).run_deleted.run_id == deleted.run_id
        trainer.service.stop()
        assert not [message for message in watch if message.HasField("run_deleted")]
        said.put(None)


def test_a_trainer_that_stops_ends_the_watches_after_the_publishes_that_need_them(trainer):
    assert trainer.start(drain_seconds=10 * PATIENCE)
    said = SimpleQueue()
    with trainer.connect() as stub, grpc.insecure_channel(f"127.0.0.1:{trainer.port}") as channel:
        hello = weights_pb.WatchVersionsRequest(hello=weights_pb.Hello(sampler_id="one"))
        said.put(hello)
        watch = WeightServiceStub(channel).WatchVersions(
            iter(said.get, None), timeout=PATIENCE, metadata=peer_metadata("")
        )
        assert next(watch).HasField("welcome")
        run = WarmRun(stub)
        with ThreadPoolExecutor() as pool:
            publishing = pool.submit(run.publish, wait_for=pb.ACK_POLICY_ALL, ack_timeout_ms=int(1e3 * PATIENCE))
            model = next(message for message in watch if message.HasField("announcement")).announcement.manifest.model
            trainer.service.stop()
            wait_for(lambda: "draining" in trainer.text(), PATIENCE, trainer.text)
            ack = weights_pb.Acknowledgement(run_id=model.run_id, version=1, blake3=model.blake3, sampler_id="one")
            said.put(weights_pb.WatchVersionsRequest(acknowledgement=ack))
            assert publishing.result(PATIENCE).version == 1
        assert not [message for message in watch if message.HasField("run_deleted")]
        assert watch.code() is grpc.StatusCode.OK
        said.put(None)
    assert trainer.service.wait(PATIENCE)


@contextmanager
def watching(trainer, *held):
    """Yield a sampler's watch, once it is welcomed, and a function that sends a message on it."""
    said = SimpleQueue()
    said.put(weights_pb.WatchVersionsRequest(hello=weights_pb.Hello(sampler_id="one", held=held)))
    with grpc.insecure_channel(f"127.0.0.1:{trainer.port}") as channel:
        watch = WeightServiceStub(channel).WatchVersions(
            iter(said.get, None), timeout=PATIENCE, metadata=peer_metadata("")
        )
        assert next(watch).HasField("welcome")
        yield watch, said.put
        said.put(None)


def test_a_kill_between_the_announcement_of_a_version_and_its_answer_sends_no_sampler_back(trainer):
    assert trainer.start(failpoints="after_execute:4")
    with trainer.connect() as stub:
        run = WarmRun(stub)
        run.publish(durable=True)
        run.step()
        publish = pb.PublishWeightsRequest(run_id=run.run_id, seq_id=4, wait_for=pb.ACK_POLICY_ALL)
        with watching(trainer) as (watch, say):
            publishing = stub.PublishWeights.future(publish)
            second = next(one for one in announced(watch) if one.manifest.model.version == 2).manifest.model
            ack = weights_pb.Acknowledgement(run_id=run.run_id, version=2, blake3=second.blake3, sampler_id="one")
            say(weights_pb.WatchVersionsRequest(acknowledgement=ack))
            assert trainer.service.wait(PATIENCE)
        assert publishing.exception(PATIENCE), "it was answered before the kill"
        held = weights_pb.HeldVersion(run_id=run.run_id, version=2, blake3=second.blake3, newest=True)
        # The run is not restored here: the replay of its step kills each engine.
        assert trainer.start(failpoints="engine_OptimStep:1+")
        with watching(trainer, held) as (watch, _):
            trainer.service.stop()
            assert not [one for one in announced(watch) if one.newest_version < 2]
        with suppress(ProcessLookupError):  # it is ending
            trainer.kill()
        assert trainer.service.wait(PATIENCE)
        assert trainer.start()
        with watching(trainer, held):
            assert run.call("PublishWeights", publish).model == second


def announced(watch):
    """Yield the announcements of a watch until it ends."""
    return (message.announcement for message in watch if message.HasField("announcement"))

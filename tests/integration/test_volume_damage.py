"""Damage to a volume, full or not, costs only its own run, and nothing intact is deleted because of it."""

import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.patience import PATIENCE
from support.stacks.cluster import wait_for
from support.stacks.warm_trainer import DATUM, WarmRun

from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb

pytestmark = pytest.mark.services


def flip(path, place=0.5):
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


@pytest.fixture
def trainer(fresh_trainer):
    return fresh_trainer


def folder_of(trainer, run):
    return trainer.volume / "runs" / run.run_id


def snapshots(trainer, run):
    return sorted(path.name for path in (folder_of(trainer, run) / "snapshots").glob("[0-9]*"))


def are_held(stub, run, seq_ids):
    """Return whether these commands have arrived and wait for an earlier one."""
    now = pb.FollowRequest(run_id=run.run_id, seq_ids=seq_ids, max_seconds=0.0)
    return {reply.status.state for reply in stub.Follow(now, timeout=PATIENCE)} == {pb.COMMAND_STATE_HELD}


def killed_after_a_save_and_a_step(trainer, stub):
    """Make a run, save it, take a step, and kill the trainer; return the run and the path of its checkpoint."""
    run = WarmRun(stub)
    path = run.save("kept").path
    run.step()
    trainer.kill()
    return run, path


def files_of(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_volume_of_another_format_is_refused_and_not_touched(trainer):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        WarmRun(stub).step()
    trainer.kill()
    file = trainer.volume / "volume.json"
    file.write_text(file.read_text().replace('"format":1', '"format":2'))
    before = files_of(trainer.volume)
    assert not trainer.start()
    assert "has format 2 and this trainer reads format 1; nothing was changed" in trainer.text()
    assert files_of(trainer.volume) == before


def test_damage_to_small_files_costs_at_most_their_own_run(trainer):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        copied, lost, whole, later = (WarmRun(stub, name) for name in ("copied", "lost", "whole", "later"))
        for run in (copied, lost, whole, later):
            run.step()
        for _ in range(2):
            whole.publish(durable=True)
        trainer.kill()
        flip(folder_of(trainer, copied) / "run.json")
        for name in ("run.json", "run.copy.json"):
            (folder_of(trainer, lost) / name).write_bytes(b"")
        versions = folder_of(trainer, whole) / "versions"
        (versions / "2" / "manifest.json").write_bytes(b"{")
        (versions / "1.bak").mkdir()
        (trainer.volume / "deleted-runs.json").write_bytes(b"")
        (segment,) = (folder_of(trainer, later) / "journal").glob("*.journal")
        segment.write_bytes(b"PACEJNL9" + segment.read_bytes()[8:])
        kept = {run: files_of(folder_of(trainer, run)) for run in (lost, later)}
        assert trainer.start(), trainer.text()
        assert list(copied.get().damage) == ["run.json.damaged-1"]
        assert list(whole.get().damage) == ["versions/2.damaged-1"]
        for run in (copied, whole):
            assert run.step().step == 2
        assert whole.publish().version > 2
        for run in (lost, later):
            with pytest.raises(errors.RunStateLost, match="files were left unchanged"):
                run.get()
            assert files_of(folder_of(trainer, run)) == kept[run]
        assert lost.run_id in trainer.text()


def test_a_damaged_snapshot_costs_a_longer_replay_and_a_damaged_journal_leaves_the_snapshot(trainer):
    assert trainer.start(snapshot_commands=4), trainer.text()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        answers = []
        for expected in (["4"], ["4", "8"]):  # in turn: a snapshot holds what is executed when it is made
            answers += [run.step(), run.step()]
            wait_for(lambda expected=expected: snapshots(trainer, run) == expected)
        answers.append(run.step())
        trainer.kill()
        flip(folder_of(trainer, run) / "snapshots" / "8" / "optimizer.safetensors")
        assert trainer.start(snapshot_commands=100)
        found = run.get()
        assert (found.state, found.step) == (pb.RUN_STATE_READY, 5)
        assert list(found.damage) == ["snapshots/8.damaged-1"]
        run.seq_id = 8
        assert run.step() == answers[4]
        trainer.kill()
        flip(sorted((folder_of(trainer, run) / "journal").glob("*.journal"))[-1], 0.1)
        assert trainer.start(snapshot_commands=100)
        with pytest.raises(errors.RunStateLost) as caught:
            run.forward_backward()
        restored = caught.value.metadata["checkpoint"]
        assert restored == f"paceline://{run.run_id}/state/restored-4"
        found = run.get()
        assert list(found.damage) == ["journal.damaged-1", "snapshots/8.damaged-1"]
        run.seq_id = found.last_seq_id
        assert run.load(restored).step == 2
        assert run.step().grad_norm == answers[2].grad_norm
        trainer.kill()
        assert trainer.start()
        assert run.step().step == 4


def test_a_replay_without_its_snapshot_loads_the_checkpoint_that_was_loaded_and_not_what_overwrote_it(trainer):
    assert trainer.start(snapshot_commands=5), trainer.text()
    with trainer.connect() as stub:
        run, twin = WarmRun(stub, "run"), WarmRun(stub, "twin")
        for one in (run, twin):
            one.step()
            path = one.save("kept").path
            one.load(path)
        with ThreadPoolExecutor(4) as threads:  # what waits for command 5 is written to the journal together with it
            adamw = pb.AdamwParams(learning_rate=1e-2)
            kind = pb.CHECKPOINT_KIND_STATE
            later = []
            for seq_id, message, fields in (
                (6, pb.OptimStepRequest, {"adamw": adamw}),
                (7, pb.SaveCheckpointRequest, {"name": "kept", "kind": kind, "overwrite": True}),
                (8, pb.ForwardBackwardRequest, {"data": [DATUM], "loss_fn": "cross_entropy"}),
                (9, pb.OptimStepRequest, {"adamw": adamw}),
            ):
                method = message.DESCRIPTOR.name.removesuffix("Request")
                request = message(run_id=run.run_id, seq_id=seq_id, **fields)
                later.append(threads.submit(run.call, method, request))
            wait_for(lambda: are_held(stub, run, [6, 7, 8, 9]))
            run.forward_backward()
            for answer in later:
                answer.result()
        run.seq_id = 9
        wait_for(lambda: snapshots(trainer, run))
        journal = folder_of(trainer, run) / "journal"
        assert min(path.name for path in journal.glob("*.journal")).startswith(f"{1:020d}")
        twin.step()
        twin.save("kept", overwrite=True)
        twin.step()
        trainer.kill()
        for name in snapshots(trainer, run):
            flip(folder_of(trainer, run) / "snapshots" / name / "optimizer.safetensors")
        assert trainer.start(), trainer.text()
        assert run.get().damage
        step, expected = run.step(), twin.step()
        assert step.step == expected.step == 4
        assert step.grad_norm == expected.grad_norm


def test_a_replay_whose_loaded_checkpoint_is_gone_loses_the_run_and_loads_no_other(trainer):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        run.step()
        run.load(run.save("kept").path)
        run.step()
        path = run.save("kept", overwrite=True).path
        assert run.publish().version == 1
        trainer.kill()
        shutil.rmtree(folder_of(trainer, run) / "loads")
        assert trainer.start(), trainer.text()
        with pytest.raises(errors.RunStateLost):
            run.forward_backward()
        assert run.get().state == pb.RUN_STATE_LOST
        assert "the checkpoint that command 4 loaded is no longer kept" in trainer.text()
        run.load(path)
        assert run.publish().version > 64, "a number that may have been seen before is not used again"


def test_a_load_that_is_refused_leaves_a_lost_run_as_it_is(trainer):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        run, path = killed_after_a_save_and_a_step(trainer, stub)
        (segment,) = (folder_of(trainer, run) / "journal").glob("*.journal")
        flip(segment, 0.1)
        assert trainer.start(), trainer.text()
        last = run.get().last_seq_id
        assert run.get().state == pb.RUN_STATE_LOST
        for seq_id, named, error in (
            (2**64 - 1, path, errors.OutOfRange),
            (10**15, path, errors.OutOfRange),
            (last + (1 << 20) + 1, path, errors.OutOfRange),
            (last + 1000, "no path", errors.InvalidPath),
        ):
            load = pb.LoadCheckpointRequest(path=named, with_optimizer=True)
            with pytest.raises(error):
                run.call("LoadCheckpoint", pb.LoadCheckpointRequest(run_id=run.run_id, seq_id=seq_id, path=named))
            with pytest.raises(error):
                run.execute(load, seq_id)
        assert run.get().last_seq_id == last
        run.seq_id = last + 5
        run.load(path)
        assert run.get().last_seq_id == last + 6
        run.forward_backward()
        with pytest.raises(errors.PrecedingRefused, match="is not known to have succeeded"):
            run.send(
                "OptimStep", pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=1e-2), only_if_succeeded_since=last
            )
        assert run.step().step == 1


def test_damage_to_the_only_snapshot_costs_a_replay_from_the_beginning(trainer):
    assert trainer.start(snapshot_commands=4), trainer.text()
    with trainer.connect() as stub:
        run, twin = WarmRun(stub, "run"), WarmRun(stub, "twin")
        for one in (run, twin):
            one.step()
            one.step()
        wait_for(lambda: snapshots(trainer, run) == snapshots(trainer, twin) == ["4"])
        trainer.kill()
        flip(folder_of(trainer, run) / "snapshots" / "4" / "optimizer.safetensors")
        assert trainer.start(), trainer.text()
        step, expected = run.step(), twin.step()
        assert (step.step, step.grad_norm) == (3, expected.grad_norm)


def test_without_its_journal_a_run_takes_no_seq_id_again(trainer):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        run, path = killed_after_a_save_and_a_step(trainer, stub)
        shutil.rmtree(folder_of(trainer, run) / "journal")
        assert trainer.start()
        run.seq_id = 1
        with pytest.raises(errors.SeqIdExpired):
            run.load(path)
        run.seq_id = run.get().last_seq_id
        assert run.seq_id >= 3
        run.load(path)
        assert run.step().step == 1


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_deletion_that_was_interrupted_is_finished_at_the_next_start(trainer, checkpoints):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        run.save("kept")
        run.publish(durable=True)
        trainer.kill()
        folder = folder_of(trainer, run)
        if checkpoints:
            folder.rename(folder.with_name(f".deleted-{run.run_id}"))
        else:
            (folder / "run.json").rename(folder / "deleted.json")
        (folder.parent / ".old-0123").mkdir()
        (folder.parent / ".old-0123" / "run.json").write_text("{}")
        assert trainer.start(), trainer.text()
        left = {str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*") if path.is_dir()}
        name = run.run_id
        assert left == (set() if checkpoints else {name, f"{name}/state", f"{name}/state/kept"})
        with pytest.raises(errors.RunNotFound):
            run.get()
        with pytest.raises(errors.RunNotFound):
            WarmRun(stub)


def test_a_run_is_deleted_while_a_publish_waits_for_acknowledgements(trainer):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        request = pb.PublishWeightsRequest(
            run_id=run.run_id, seq_id=1, wait_for=pb.ACK_POLICY_ANY, ack_timeout_ms=3_600_000
        )
        publishing = stub.PublishWeights.future(request, timeout=3600)
        wait_for(lambda: run.get().latest_version == 1, 60)
        run.call("DeleteRun", pb.DeleteRunRequest(run_id=run.run_id))
        assert "RUN_NOT_FOUND" in str(publishing.exception()) or publishing.exception() is not None
        assert not folder_of(trainer, run).exists() or (folder_of(trainer, run) / "deleted.json").exists()


def test_more_runs_than_descriptors_are_served_and_one_that_cannot_be_made_leaves_nothing(trainer):
    assert trainer.start(max_runs_per_tenant=1000), trainer.text()
    with trainer.connect() as stub:
        before = len(list(Path(f"/proc/{trainer.service.pid}/fd").iterdir()))
        runs = [WarmRun(stub, f"r{number}") for number in range(40)]
        for run in runs:
            run.forward_backward()
        after = len(list(Path(f"/proc/{trainer.service.pid}/fd").iterdir()))
        assert after < before + 20
        folders = set((trainer.volume / "runs").iterdir())
        with pytest.raises(errors.PacelineError):
            WarmRun(stub, "bad", rank=0)
        assert set((trainer.volume / "runs").iterdir()) == folders


def test_a_full_staging_directory_is_not_called_the_checkpoint_volume(trainer):
    assert trainer.start(), trainer.text()
    with trainer.connect() as stub:
        run = WarmRun(stub)
        for pid in trainer.service.engines():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        with pytest.raises(errors.DiskFull, match="staging_dir is full"):
            run.publish()

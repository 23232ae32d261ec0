"""docs/how-to/back-up-restore-upgrade.md: services on a copy of a backup have every run as it was, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.doc_pages import ROOT
from support.models.tiny_models import make_tiny_llama
from support.page_code import PageRunner, blocks
from support.stacks.cluster import Cluster

import paceline
from paceline import AdamParams, Datum

pytestmark = pytest.mark.services
PAGE = ROOT / "docs" / "how-to" / "back-up-restore-upgrade.md"
DATA = [Datum.from_completion([1, 2, 3], [4, 5, 6])]


def step(training):
    training.forward_backward(DATA, "cross_entropy")
    return training.optim_step(AdamParams(learning_rate=1e-2)).result().step


def logprobs(training):
    return training.forward(DATA, "cross_entropy").result().loss_fn_outputs[0]["logprobs"]


def test_a_restored_copy_goes_on_where_the_backup_was(tmp_path, monkeypatch):
    model = make_tiny_llama(tmp_path / "model")
    runner = PageRunner("back-up-restore-upgrade", tmp_path, monkeypatch, str)
    back_up, restore = (block for block in blocks(PAGE.read_text()) if block.note.startswith("run: "))

    before = Cluster.make(tmp_path / ".paceline", model)
    with before.running(), paceline.ServiceClient(before.address, before.api_key) as service:
        training = service.create_lora_training_client(rank=4, user_metadata={"name": "kept"})
        step(training)
        training.log({"reward": 1.0}).result()
        first = training.publish_weights().result().model
        saved = training.save_state("saved").result()
        training.forward_backward(DATA, "cross_entropy").result()  # its gradient waits
        was, info = logprobs(training), training.get_info()
    runner.run(back_up)

    with before.running(), paceline.ServiceClient(before.address, before.api_key) as service:
        training = service.get_training_client(info.run_id)
        training.optim_step(AdamParams(learning_rate=1e-2)).result()
        lost = training.publish_weights().result().model
        went_on = logprobs(training)
    runner.run(restore)

    after = Cluster.make(tmp_path / "restored", model)
    assert after.api_key == before.api_key
    with after.running(), paceline.ServiceClient(after.address, after.api_key) as service:
        (run,) = service.list_runs()
        assert (run.run_id, run.step, run.user_metadata) == (info.run_id, 1, {"name": "kept"})
        assert service.list_checkpoints(run.run_id)[0].path == saved.path
        assert service.metrics(run.run_id)["reward"].tolist() == [1.0]
        sampling = service.create_sampling_client(run_id=run.run_id, version=first.version)
        assert sampling.compute_logprobs([1, 2, 3]).result().model == first
        training = service.get_training_client(run.run_id)
        np.testing.assert_array_equal(logprobs(training), was)
        # The gradient that waited is the same, and so are the optimizer and the bits of what follows.
        assert training.optim_step(AdamParams(learning_rate=1e-2)).result().step == 2
        np.testing.assert_array_equal(logprobs(training), went_on)
        again = training.publish_weights().result().model
        assert (again.version, again.blake3) == (lost.version, lost.blake3)
        step(training)
        assert training.publish_weights().result().model.version == lost.version + 1

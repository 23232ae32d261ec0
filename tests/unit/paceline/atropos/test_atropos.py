"""How `paceline atropos` handles batches, options and restarts."""

from __future__ import annotations

import argparse
import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.atropos.api import AtroposApi
from paceline.atropos.groups import logprob_metrics, make_batch, micro_batches, temperature_of
from paceline.atropos.options import add_arguments, layer_indices, read_options
from paceline.atropos.trainer import AtroposTrainer, Progress, PulledBatch


def group(scores=(1.0, 0.0), **more):
    n = len(scores)
    return {
        "tokens": [[1, 2, 3, 4, 5]] * n,
        "masks": [[-100, -100, 3, 4, 5]] * n,
        "scores": list(scores),
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25, -2.0]] * n,
        **more,
    }


def test_a_sequence_is_shifted_and_its_loss_is_its_share_of_the_mean():
    batch = make_batch([group(), group((3.0,))], seq_len=64)
    assert len(batch.sequences) == 3
    datum = batch.sequences[0].datum
    assert datum.model_input.tolist() == [1, 2, 3, 4]
    assert datum.loss_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert datum.loss_inputs["mask"].tolist() == [0, 1, 1, 1]
    assert datum.loss_inputs["logprobs"].tolist() == [0.0, -0.5, -0.25, -2.0]
    advantages = [each.datum.loss_inputs["advantages"] for each in batch.sequences]
    # (1 - 0.5) / 0.5, (0 - 0.5) / 0.5, and the score of a group of one; each over 3 tokens and 3 sequences
    wanted = [[0, 1 / 9, 1 / 9, 1 / 9], [0, -1 / 9, -1 / 9, -1 / 9], [0, 3 / 9, 3 / 9, 3 / 9]]
    np.testing.assert_allclose(advantages, wanted, rtol=1e-6)
    assert "temperature" not in datum.loss_inputs


def test_overrides_masks_and_advantages_of_its_own_count():
    zero = make_batch([group(overrides=[{"set_advantage_to_zero": True}, {}])], 64).sequences
    assert not zero[0].datum.loss_inputs["advantages"].any()
    assert zero[1].datum.loss_inputs["advantages"].any()
    own = make_batch([group(advantages=[[0, 0, 1.0, 2.0, 3.0]] * 2)], 64).sequences[0]
    np.testing.assert_allclose(own.datum.loss_inputs["advantages"], [0, 1 / 6, 2 / 6, 3 / 6], rtol=1e-6)


@pytest.mark.parametrize(
    ("more", "temperature"),
    [
        ({}, 1.0),
        ({"group_overrides": {"temperature": 0.5}}, 0.5),
        ({"generation_params": {"temperature": 0.7}, "group_overrides": {"temperature": 0.5}}, 0.7),
        ({"overrides": [{"temperature": 0.9}], "generation_params": {"temperature": 0.7}}, 0.9),
        ({"generation_params": {"temperature": 0.0}}, 1.0),
    ],
)
def test_the_temperature_is_that_of_the_nearest_place(more, temperature):
    given = group(**more)
    assert temperature_of(given, 0) == temperature
    inputs = make_batch([given], 64).sequences[0].datum.loss_inputs
    assert set(inputs.get("temperature", np.ones(1)).tolist()) == {np.float32(temperature)}


def test_what_has_no_logprobs_or_nothing_to_train_is_counted_and_left_out():
    given = group(inference_logprobs=[[1.0, 1.0, -0.5, -0.25, -2.0], []])
    given["masks"] = [[-100] * 5, [-100, -100, 3, 4, 5]]
    batch = make_batch([given, group(inference_logprobs=None)], 64)
    assert (len(batch.sequences), batch.skipped) == (0, 4)


def test_long_sequences_are_cut():
    (first, _) = make_batch([group()], seq_len=3).sequences
    assert first.datum.model_input.tolist() == [1, 2, 3]


@pytest.mark.parametrize("wrong", [{"scores": [1.0]}, {"masks": [[1], [1]]}, {"advantages": [[1.0], [1.0]]}])
def test_lists_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"has \d"):
        make_batch([group() | wrong], 64)


def test_micro_batches_are_the_same_each_time_and_each_is_one_command():
    sequences = make_batch([group((1.0, 0.0, 1.0, 0.0, 1.0))], 64).sequences
    assert [len(call) for call in micro_batches(sequences, 2)] == [2, 2, 1]
    long = group()
    long["tokens"], long["masks"] = [[1] * 60_001] * 2, [[-100] + [1] * 60_000] * 2
    long["inference_logprobs"] = [[-1.0] * 60_001] * 2
    assert [len(call) for call in micro_batches(make_batch([long], 10**6).sequences, 8)] == [1, 1]
    many = make_batch([group((1.0,) * 1500)], 64).sequences
    assert [len(call) for call in micro_batches(many, 2000)] == [1024, 476]


def test_alignment_is_between_trained_tokens_alone():
    sequences = make_batch([group()], 64).sequences
    outputs = [np.array([9.0, -0.5, -0.5, -1.0], np.float32)] * 2
    found = logprob_metrics(sequences, outputs)
    assert found["alignment/diff_mean"] == pytest.approx((0 - 0.25 + 1.0) / 3)
    assert found["alignment/diff_abs_mean"] == pytest.approx((0 + 0.25 + 1.0) / 3)
    assert found["alignment/diff_max"] == 1.0
    assert found["pos_logp"] == found["neg_logp"] == pytest.approx(-2 / 3)


def test_options_have_the_names_that_users_know():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--model", "Qwen/x", "--weight-bridge-mode", "lora_nccl", "--lora-layer-indices", "0-2,5"]
    options = read_options(parser.parse_args(given))
    assert (options.model, options.is_lora, options.bridge) == ("Qwen/x", True, "collective")
    assert options.lora_layer_indices == (0, 1, 2, 5)
    assert read_options(parser.parse_args(["--weight-bridge-mode", "shared_vllm"])).bridge == "shared"


@pytest.mark.parametrize("text", ["5-2", "a", "1-", "-3"])
def test_layers_that_are_none_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        layer_indices(text)


def test_settings_of_the_services_are_refused_with_their_names(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--gpu-memory-utilization", "0.5"])
    assert "PACELINE_SAMPLER_GPU_MEMORY_UTILIZATION" in capsys.readouterr().err


def test_a_batch_is_kept_until_it_is_done_with(tmp_path):
    progress = Progress(tmp_path / "state")
    assert (progress.run_id(), progress.pulled()) == ("", None)
    progress.begin("run-1")
    batch = PulledBatch(3, 17, 2, 64, 0.2, [group()])
    progress.pull(batch)
    again = Progress(tmp_path / "state")
    assert (again.run_id(), again.pulled()) == ("run-1", batch)
    again.done()
    assert progress.pulled() is None


@contextmanager
def answering(answers):
    """Serve answers, in order, or HTTP statuses; yield a client and the requests' paths with their bodies."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")))
            answer = answers.pop(0)
            content = gzip.compress(json.dumps(answer).encode())
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *_):
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield AtroposApi(f"http://127.0.0.1:{server.server_port}/"), asked
        finally:
            server.shutdown()


def test_batches_are_waited_for_and_may_be_compressed():
    with answering([{"batch": None}, {"batch": [group()]}]) as (api, _):
        assert api.next_batch(0, print) == [group()]


def test_a_server_that_was_restarted_is_told_of_the_trainer_again():
    said = []
    with answering([{"uuid": 1}, 500, {"uuid": 2}, {"batch": [group()]}]) as (api, asked):
        api.register(num_steps=9, starting_step=0)
        assert api.next_batch(4, said.append) == [group()]
    assert asked == [
        ("/register", {"num_steps": 9, "starting_step": 0}),
        ("/batch", None),
        ("/register", {"num_steps": 9, "starting_step": 4}),
        ("/batch", None),
    ]
    assert len(said) == 1


@pytest.mark.parametrize(
    "groups",
    [[group(inference_logprobs=None)], [group() | {"scores": [1.0] * 5}]],
    ids=["no log-probabilities", "lists of different lengths"],
)
def test_a_batch_that_cannot_be_trained_on_is_not_stored(tmp_path, groups):
    run = SimpleNamespace(run_id="run-1", last_seq_id=0)
    with answering([{"batch": groups}]) as (api, _):
        options = SimpleNamespace(
            atropos_url=api._address, state=tmp_path, seq_len=64, benchmark=False, log_dir=None, use_wandb=False
        )
        trainer = AtroposTrainer(options, SimpleNamespace(get_run=lambda run_id: run), print)
        with pytest.raises(ValueError, match=r"log-probabilities|scores"):
            trainer._step(run, 0)
    assert Progress(tmp_path).pulled() is None


def test_a_server_that_is_away_is_told_by_its_address():
    with pytest.raises(ConnectionError, match="--atropos-url"):
        AtroposApi("http://127.0.0.1:9").wait(0.0, print)

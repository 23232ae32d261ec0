"""How `paceline atropos` handles batches, options and restarts."""

from __future__ import annotations

import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.atropos.api import AtroposApi
from paceline.atropos.groups import Bounds, logprob_metrics, make_batch, micro_batches
from paceline.atropos.options import Options
from paceline.atropos.trainer import AtroposTrainer, Progress, PulledBatch
from paceline.cli import main


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
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 1, 1, 1]
    assert datum.loss_fn_inputs["logprobs"].tolist() == [0.0, -0.5, -0.25, -2.0]
    advantages = [each.datum.loss_fn_inputs["advantages"] for each in batch.sequences]
    # (1 - 0.5) / 0.5, (0 - 0.5) / 0.5, and the score of a group of one; each over 3 tokens and 3 sequences
    wanted = [[0, 1 / 9, 1 / 9, 1 / 9], [0, -1 / 9, -1 / 9, -1 / 9], [0, 3 / 9, 3 / 9, 3 / 9]]
    np.testing.assert_allclose(advantages, wanted, rtol=1e-6)
    assert "temperature" not in datum.loss_fn_inputs


def test_overrides_masks_and_advantages_of_its_own_count():
    zero = make_batch([group(overrides=[{"set_advantage_to_zero": True}, {}])], 64).sequences
    assert not zero[0].datum.loss_fn_inputs["advantages"].any()
    assert zero[1].datum.loss_fn_inputs["advantages"].any()
    own = make_batch([group(advantages=[[0, 0, 1.0, 2.0, 3.0]] * 2)], 64).sequences[0]
    np.testing.assert_allclose(own.datum.loss_fn_inputs["advantages"], [0, 1 / 6, 2 / 6, 3 / 6], rtol=1e-6)


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
    inputs = make_batch([group(**more)], 64).sequences[0].datum.loss_fn_inputs
    assert set(inputs.get("temperature", np.ones(1)).tolist()) == {np.float32(temperature)}


def test_what_has_no_logprobs_or_nothing_to_train_is_counted_and_left_out():
    given = group(inference_logprobs=[[1.0, 1.0, -0.5, -0.25, -2.0], []])
    given["masks"] = [[-100] * 5, [-100, -100, 3, 4, 5]]
    batch = make_batch([given, group(inference_logprobs=None)], 64)
    assert (len(batch.sequences), batch.skipped) == (0, 4)


def test_long_sequences_are_cut():
    (first, _) = make_batch([group()], seq_len=3).sequences
    assert first.datum.model_input.tolist() == [1, 2, 3]


GOOD = [1.0, 1.0, -0.5, -0.25, -2.0]
BAD_GROUPS = {
    "no object": [1],
    "nothing": None,
    "no tokens": {"masks": []},
    "no sequences": group(()),
    "a score too few": group() | {"scores": [1.0]},
    "a score that is NaN": group((1.0, float("nan"))),
    "a score that is infinite": group((1.0, float("inf"))),
    "a score that is text": group(("1.0", 0.0)),
    "no score": group((None, 0.0)),
    "scores that are no list": group() | {"scores": 1.0},
    "a mask too few": group() | {"masks": [[-100, -100, 3, 4, 5]]},
    "log-probabilities too few": group(inference_logprobs=[GOOD]),
    "log-probabilities too many": group(inference_logprobs=[GOOD] * 3),
    "overrides too many": group(overrides=[{}, {}, {"temperature": 0.5}]),
    "overrides of another type": group(overrides=[0.5, {}]),
    "parameters of another type": group(generation_params=[1]),
    "advantages too few": group(advantages=[[0.0] * 5]),
    "advantages that are text": group(advantages=["12345", "12345"]),
    "advantages of several dimensions": group(advantages=[[[1.0], [1.0, 2.0]], [0.0] * 5]),
}


@pytest.mark.parametrize("kind", BAD_GROUPS)
def test_a_bad_group_costs_itself_alone_and_is_named(kind):
    bad = BAD_GROUPS[kind]
    if isinstance(bad, dict):
        bad["env_id"] = 7
    alone, batch = make_batch([group()], 64), make_batch([group(), bad], 64)
    assert [each.datum.loss_fn_inputs["advantages"].tolist() for each in batch.sequences] == [
        each.datum.loss_fn_inputs["advantages"].tolist() for each in alone.sequences
    ]
    assert (batch.skipped_groups, list(batch.problems.values())) == (1, [1])
    (problem,) = batch.problems
    assert "environment 7" in problem or not isinstance(bad, dict)
    assert make_batch([bad], 64).sequences == ()


BAD_SEQUENCES = {
    "no log-probabilities": {"inference_logprobs": None},
    "short log-probabilities": {"inference_logprobs": GOOD[:3]},
    "log-probabilities too many": {"inference_logprobs": [*GOOD, -1.0]},
    "a log-probability that is NaN": {"inference_logprobs": [*GOOD[:4], float("nan")]},
    "a log-probability that is infinite": {"inference_logprobs": [*GOOD[:4], float("-inf")]},
    "a placeholder where a token is trained": {"inference_logprobs": [*GOOD[:4], 1.0]},
    "no number": {"inference_logprobs": [*GOOD[:4], None]},
    "a mask too short": {"masks": [-100, 2]},
    "a mask too long": {"masks": [-100, -100, 3, 4, 5, 6]},
    "a mask of ones and zeros": {"masks": [0, 0, 1, 1, 1], "inference_logprobs": [-1.0] * 5},
    "a mask of other tokens": {"masks": [-100, -100, 3, 4, 6]},
    "nothing trained": {"masks": [-100] * 5},
    "a mask of another type": {"masks": "masks"},
    "a token beyond the vocabulary": {"tokens": [1, 2, 3, 4, 512]},
    "a token below it": {"tokens": [1, 2, 3, 4, -1]},
    "a token that is no integer": {"tokens": [1, 2, 3, 4, 5.5]},
    "a token that is huge": {"tokens": [1, 2, 3, 4, 1 << 70]},
    "no tokens": {"tokens": []},
    "tokens of another type": {"tokens": None},
    "nested tokens": {"tokens": [[1, 2, 3, 4, 5]]},
    "advantages too few": {"advantages": [1.0, 1.0]},
    "an advantage that is NaN": {"advantages": [0.0, 0.0, 0.0, 0.0, float("nan")]},
    "an advantage that float32 cannot hold": {"advantages": [0.0, 0.0, 0.0, 0.0, 1e300]},
    "a temperature that is text": {"overrides": {"temperature": "hot"}},
    "a temperature that is NaN": {"overrides": {"temperature": float("nan")}},
    "a temperature below 0": {"overrides": {"temperature": -1.0}},
    "a temperature that is too high": {"overrides": {"temperature": 1e30}},
}


@pytest.mark.parametrize("kind", BAD_SEQUENCES)
def test_a_bad_sequence_costs_itself_alone_and_is_counted(kind):
    given = group(overrides=[{}, {}], advantages=[[0.0, 0.0, 1.0, 1.0, 1.0]] * 2, env_id=3)
    for name, value in BAD_SEQUENCES[kind].items():
        given[name] = [given[name][0], value]
    batch = make_batch([given], 64, Bounds(512, 64))
    assert (len(batch.sequences), batch.skipped, batch.skipped_groups) == (1, 1, 0)
    (problem,) = batch.problems
    assert problem.startswith("a sequence of environment 3 has ")


def test_a_sequence_is_cut_at_the_models_context_too():
    (first, _) = make_batch([group()], 64, Bounds(512, 3)).sequences
    assert first.datum.model_input.tolist() == [1, 2, 3]


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


@pytest.fixture
def options_of(monkeypatch):
    """Read the options of a command line as `paceline atropos` does."""

    def read(*given):
        found = []
        monkeypatch.setattr(AtroposTrainer, "run", lambda trainer: found.append(trainer.options))
        assert main(["atropos", *given]) == 0
        return found[0]

    return read


def test_options_have_the_names_that_users_know(options_of, tmp_path):
    given = ["--model", "Qwen/x", "--weight-bridge-mode", "lora_nccl", "--lora-layer-indices", "0-2,5"]
    options = options_of(*given, "--state", str(tmp_path), "--lora-target-modules", "q_proj", "o_proj", "--lora-r", "4")
    assert (options.model, options.is_lora, options.bridge, options.lora_r) == ("Qwen/x", True, "collective", 4)
    assert options.lora_layer_indices == (0, 1, 2, 5)
    assert options.lora_target_modules == ("q_proj", "o_proj")
    assert options_of("--weight-bridge-mode", "shared_vllm", "--state", str(tmp_path)).bridge == "shared"


def test_options_that_are_not_given_have_the_defaults_of_the_class(options_of, tmp_path):
    assert options_of("--state", str(tmp_path)) == Options(state=tmp_path)
    assert Options(run_name="policy").directory == Path(".paceline/atropos/policy")


@pytest.mark.parametrize("text", ["5-2", "a", "1-", "-3"])
def test_layers_that_are_none_are_refused(text, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["atropos", f"--lora-layer-indices={text}"]) == 2
    assert f"'{text}' is not a layer or range of layers" in capsys.readouterr().err


def test_settings_of_the_services_are_refused_with_their_names(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["atropos", "--gpu-memory-utilization", "0.5"]) == 2
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


def trainer_of(api, state, said):
    options = Options(
        atropos_url=api.address,
        state=state,
        seq_len=64,
        batch_size=2,
        clip_eps=0.2,
        benchmark=False,
        log_dir=None,
        use_wandb=False,
    )
    return AtroposTrainer(
        options, SimpleNamespace(get_run=lambda _: SimpleNamespace(last_seq_id=0, step=1)), said.append
    )


def test_a_batch_of_which_nothing_can_be_trained_on_is_dropped_and_the_next_is_trained(tmp_path):
    bad = [group(inference_logprobs=None, env_id=4), group() | {"scores": [1.0] * 5}, "group"]
    said, trained = [], []
    with answering([{"batch": bad}, 500, {"uuid": 1}, {"batch": [group(), *bad]}]) as (api, _):
        trainer = trainer_of(api, tmp_path, said)
        trainer.train = lambda training, pulled, batch: trained.append(batch) or {"skipped_sequences": 0.0}
        trainer.publish = lambda training, step: {}
        logged = []
        trainer.log.add = lambda step, metrics: logged.append(metrics)
        trainer.step(SimpleNamespace(run_id="run-1"), 0)
    (batch,) = trained
    assert len(batch.sequences) == 2
    assert (logged[0]["skipped_sequences"], logged[0]["skipped_groups"]) == (8, 4)
    assert "step 1: nothing of the batch can be trained on, it is dropped; waiting for the next" in said
    assert any("2 times: a sequence of environment 4 has no inference_logprobs" in line for line in said)
    assert Progress(tmp_path).pulled() is None


def test_an_answer_that_is_no_json_object_is_left_out_and_said():
    said = []
    with answering([[1], {"batch": 5}, {"batch": [group()]}]) as (api, _):
        assert api.next_batch(0, said.append) == [group()]
    assert said == ["the Atropos API server's batch is left out: it is no JSON object"]


def test_a_server_that_is_away_is_told_by_its_address():
    with pytest.raises(ConnectionError, match="--atropos-url"):
        AtroposApi("http://127.0.0.1:9").wait(0.0, print)

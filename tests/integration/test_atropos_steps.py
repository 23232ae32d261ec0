"""How `paceline atropos` finishes a step that was interrupted or refused in part, against a toy trainer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from support.patience import PATIENCE
from support.stacks import toy_trainer

from paceline import RetryPolicy, ServiceClient, codec, errors
from paceline.atropos.trainer import AtroposTrainer, Progress, _is_refusal, _was_turned_away
from paceline.client.commands import MAX_COMMANDS_UNANSWERED

ONCE = RetryPolicy(budget=0.0)


def group(*sequences):
    """A group of sequences, of which each has the same prompt of one token."""
    return {
        "tokens": [list(tokens) for tokens in sequences],
        "masks": [[-100, *tokens[1:]] for tokens in sequences],
        "scores": [float(index) for index in range(len(sequences))],
        "inference_logprobs": [[-1.0] * len(tokens) for tokens in sequences],
    }


SEQUENCES = [[0, 1, 1, 1, 1], [0, 2, 2, 2, 2], [0, 3, 3, 3, 3], [0, 4, 4, 4, 4]]


class Command:
    """`paceline atropos`, which pulls the given batches; each instance is a process of its own."""

    def __init__(self, server, state, batches, **changed):
        options = {"batch_size": 1, "seq_len": 64, "clip_eps": 0.2, "lr": 0.1, "warmup_steps": 0, "optimizer": "adamw"}
        options |= {"training_steps": 99, "vllm_restart_interval": 1, "checkpoint_interval": 0, "benchmark": False}
        options |= {"atropos_url": "", "state": state, "log_dir": None, "use_wandb": False}
        self.said: list[str] = []
        self.metrics: list[dict[str, float]] = []
        self._server = server
        self._options = SimpleNamespace(**options | changed)
        self._api = SimpleNamespace(next_batch=lambda step, say: batches.pop(0))

    async def step(self):
        """Train one step."""

        def work():
            with ServiceClient(self._server.address, retry=ONCE) as service:
                trainer = AtroposTrainer(self._options, service, self.said.append)
                trainer._api = self._api
                trainer._log.add = lambda step, metrics: self.metrics.append(metrics)
                training = service.get_training_client(self._server.trainer.run_id)
                trainer._step(training, service.get_run(training.run_id).step)

        await asyncio.to_thread(work)


def trained(trainer):
    """Return the sequences of each forward_backward that was executed, in order, and "step" for each step."""
    done = []
    for (payload, answer), name in zip(
        (trainer.answers[seq_id] for seq_id in sorted(trainer.answers)), trainer.executed, strict=True
    ):
        if name == "OptimStep" and not isinstance(answer, errors.PacelineError):
            done.append("step")
        if name == "ForwardBackward" and not isinstance(answer, errors.PacelineError):
            request = next(each for each in trainer.requests if each.SerializeToString(deterministic=True) == payload)
            done.append([codec.datum_from_proto(each, "data").model_input.tolist() for each in request.data])
    return done


async def test_an_interrupted_step_is_finished_as_it_began_and_the_next_has_the_new_options(server, tmp_path):
    batches, trainer = [[group(*SEQUENCES)], [group(*SEQUENCES)]], server.trainer
    trainer.refusals = {seq_id: [errors.EngineUnavailable("restarts")] for seq_id in (3, 4)}
    with pytest.raises(errors.PacelineError):
        await Command(server, tmp_path, batches).step()
    assert trained(trainer) == [[[0, 1, 1, 1]], [[0, 2, 2, 2]]]
    again = Command(server, tmp_path, batches, batch_size=3, seq_len=2, clip_eps=0.5)
    await again.step()
    whole = [*([[tokens[:-1]] for tokens in SEQUENCES]), "step"]
    assert trained(trainer) == whole
    configs = [request.loss_fn_config["clip_high_threshold"] for request in trainer.requests
               if hasattr(request, "loss_fn")]  # fmt: skip
    assert set(np.round(configs, 6)) == {1.2}
    await again.step()
    assert trained(trainer) == [*whole, [[0, 1], [0, 2], [0, 3]], [[0, 4]], "step"]


REFUSED = [[0, 1, 1, 1, 1], [0, 2, 99, 2, 2], [0, 3, 3, 3, 3]]
"""The toy trainer refuses the second, since its vocabulary is smaller."""


async def test_no_step_is_taken_while_a_part_of_the_batch_is_refused_and_a_restart_sends_it_once_more(
    server, tmp_path, monkeypatch
):
    batches, trainer = [[group(*REFUSED)]], server.trainer
    first = Command(server, tmp_path, batches)
    with pytest.raises(errors.TokenOutOfRange):
        await first.step()
    assert trained(trainer) == [[[0, 1, 1, 1]], [[0, 3, 3, 3]]]
    assert "1 of 3 forward_backwards were refused" in first.said[0]
    monkeypatch.setattr(toy_trainer, "VOCABULARY", 100)
    monkeypatch.setattr(trainer, "theta", np.zeros((100, 100)))
    monkeypatch.setattr(trainer, "gradient", np.zeros((100, 100)))
    await Command(server, tmp_path, batches).step()
    assert trained(trainer) == [[[0, 1, 1, 1]], [[0, 3, 3, 3]], [[0, 2, 99, 2]], "step"]


@pytest.mark.parametrize("attempts", [1, 2, 3], ids=["used up", "not used up", "nor by another client"])
async def test_what_was_turned_away_is_sent_again_though_the_client_has_used_up_its_place(server, tmp_path, attempts):
    batches, trainer = [[group(*SEQUENCES)]], server.trainer
    trainer.gap_seconds = 0.1
    trainer.refusals[2] = [errors.Overloaded("full") for _ in range(attempts)]
    said = 0
    for _ in range(4):
        command = Command(server, tmp_path, batches)
        try:
            await command.step()
            break
        except (errors.Overloaded, errors.SeqIdGap):
            said += 1
    done = trained(trainer)
    assert done[-1] == "step"
    assert sorted(done[:-1]) == sorted([tokens[:-1]] for tokens in SEQUENCES)
    assert said >= 1


async def finish(server, state, batches):
    """Start the command again and again until it has trained one step."""
    for _ in range(5):
        with suppress(errors.PacelineError):
            return await Command(server, state, batches).step()
    raise AssertionError("the step was never finished")


WHOLE = [*([[tokens[:-1]] for tokens in SEQUENCES]), "step"]


async def test_what_was_turned_away_and_then_executed_in_its_place_is_executed_once(server, tmp_path):
    trainer = server.trainer
    trainer.gap_seconds = 0.1
    # The second, and the empty command in its place, so that its seq_id is free after a restart; then the publish.
    trainer.refusals = {2: [errors.Overloaded("full")] * 2, 6: [errors.EngineUnavailable("restarts")]}
    await finish(server, tmp_path, [[group(*SEQUENCES)]])
    assert sorted(trained(trainer)[:-1]) == WHOLE[:-1]
    assert trained(trainer)[-1] == "step"


async def test_what_was_turned_away_and_is_then_lost_in_its_place_is_not_sent_for_another(server, tmp_path):
    trainer = server.trainer
    trainer.gap_seconds = 0.1
    trainer.refusals = {
        2: [errors.Overloaded("full")] * 2,
        4: [None, errors.UpstreamUnavailable("may have arrived")],
    }
    await finish(server, tmp_path, [[group(*SEQUENCES)]])
    assert sorted(trained(trainer)[:-1]) == WHOLE[:-1]
    assert trained(trainer)[-1] == "step"


async def test_what_was_never_sent_is_sent_by_a_restart_though_its_place_is_used_up(server, tmp_path, monkeypatch):
    trainer = server.trainer
    trainer.gap_seconds = 1.0
    # The answer about what stands in for the first is lost, so nothing more is sent; the second frees what was not.
    trainer.refusals = {
        6: [errors.Overloaded("full"), errors.UpstreamUnavailable("lost")],
        7: [errors.Overloaded("full")],
    }
    ordered = trainer._ordered

    async def late(request, context, execute):
        if request.seq_id == 7 and request.data:
            await asyncio.sleep(0.5)
        return await ordered(request, context, execute)

    monkeypatch.setattr(trainer, "_ordered", late)
    count = MAX_COMMANDS_UNANSWERED + 13
    sequences = [[0, 1 + number % 5, 1 + number // 5 % 5, 1 + number // 25, 1] for number in range(count)]
    await finish(server, tmp_path, [[group(*sequences)]])
    assert trained(trainer)[-1] == "step"
    assert sorted(trained(trainer)[:-1]) == sorted([tokens[:-1]] for tokens in sequences)


def test_what_was_never_sent_is_not_taken_for_refused_by_the_trainer():
    error = errors.Internal("the stream was reset")  # of the empty command before it
    error.was_sent = False
    assert not _is_refusal(error)
    assert _was_turned_away(error)


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_a_step_that_was_turned_away_is_taken_by_a_restart(server, tmp_path, attempts):
    trainer = server.trainer
    trainer.gap_seconds = 0.1
    trainer.refusals = {5: [errors.Overloaded("full")] * attempts}
    await finish(server, tmp_path, [[group(*SEQUENCES)]])
    assert trained(trainer) == WHOLE


async def test_a_refusal_is_stored_while_later_answers_are_awaited(server, tmp_path):
    trainer = server.trainer
    trainer.places = asyncio.Semaphore(2)
    step = asyncio.create_task(Command(server, tmp_path, [[group(*REFUSED)]]).step())
    async with asyncio.timeout(PATIENCE):
        while not ((pulled := Progress(tmp_path).pulled()) and pulled.refused):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert pulled.refused == [1]
    assert trained(trainer) == [[[0, 1, 1, 1]]]
    trainer.places.release()
    with pytest.raises(errors.TokenOutOfRange):
        await step


async def test_what_is_refused_again_is_left_out_of_the_step_and_said(server, tmp_path):
    batches, trainer = [[group(*REFUSED)], [group(*SEQUENCES)]], server.trainer
    with pytest.raises(errors.TokenOutOfRange):
        await Command(server, tmp_path, batches).step()
    again = Command(server, tmp_path, batches)
    await again.step()
    assert trained(trainer) == [[[0, 1, 1, 1]], [[0, 3, 3, 3]], "step"]
    assert "1 sequence(s) were refused again and are left out: data[0].model_input" in again.said[0]
    assert again.metrics[0]["skipped_sequences"] == 1
    await again.step()
    assert trained(trainer)[-5:] == [*([[tokens[:-1]] for tokens in SEQUENCES]), "step"]

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
from paceline.atropos.options import Options
from paceline.atropos.trainer import AtroposTrainer, Progress
from paceline.trainer.v1 import trainer_service_pb2 as pb

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
        self._options = Options(**options | changed)
        self._api = SimpleNamespace(next_batch=lambda step, say: batches.pop(0))

    async def step(self):
        """Train one step."""

        def work():
            with ServiceClient(self._server.address, retry=ONCE) as service:
                trainer = AtroposTrainer(self._options, service, self.said.append)
                trainer.api = self._api
                trainer.log.add = lambda step, metrics: self.metrics.append(metrics)
                training = service.get_training_client(self._server.trainer.run_id)
                trainer.step(training, service.get_run(training.run_id).step)

        await asyncio.to_thread(work)


def trained(trainer):
    """Return the sequences of each forward_backward in a gradient that was not discarded, and "step" for each step."""
    done, waiting = [], []
    accepted = [trainer.accepted[seq_id] for seq_id in sorted(trainer.accepted)]
    for (payload, answer), name in zip(accepted, trainer.executed, strict=False):
        if isinstance(answer.result(), errors.PacelineError):
            continue
        if name == "DiscardGradient":
            waiting = []
        if name == "ForwardBackward":
            request = pb.ForwardBackwardRequest.FromString(payload)
            waiting.append([codec.datum_from_proto(each, "data").model_input.tolist() for each in request.data])
        if name == "OptimStep":
            done, waiting = [*done, *waiting, "step"], []
    return [*done, *waiting]


WHOLE = [*([[tokens[:-1]] for tokens in SEQUENCES]), "step"]
REFUSED = [[0, 1, 1, 1, 1], [0, 2, 99, 2, 2], [0, 3, 3, 3, 3]]
"""The toy trainer refuses the second, since its vocabulary is smaller."""


async def test_an_interrupted_step_is_trained_as_it_began_and_the_next_has_the_new_options(server, tmp_path):
    batches, trainer = [[group(*SEQUENCES)], [group(*SEQUENCES)]], server.trainer
    trainer.refusals = {4: [errors.ShuttingDown("stops")]}
    with pytest.raises(errors.ShuttingDown):
        await Command(server, tmp_path, batches).step()
    assert trained(trainer) == [[[0, 1, 1, 1]], [[0, 2, 2, 2]]]
    again = Command(server, tmp_path, batches, batch_size=3, seq_len=2, clip_eps=0.5)
    await again.step()
    assert trained(trainer) == WHOLE
    configs = [request.loss_fn_config["clip_high_threshold"] for request in trainer.requests
               if hasattr(request, "loss_fn")]  # fmt: skip
    assert set(np.round(configs, 6)) == {1.2}
    await again.step()
    assert trained(trainer) == [*WHOLE, [[0, 1], [0, 2], [0, 3]], [[0, 4]], "step"]


async def test_no_step_is_taken_while_a_part_of_the_batch_is_refused_and_a_restart_trains_on_all_of_it(
    server, tmp_path, monkeypatch
):
    batches, trainer = [[group(*REFUSED)]], server.trainer
    first = Command(server, tmp_path, batches)
    with pytest.raises(errors.TokenOutOfRange):
        await first.step()
    assert "1 of 3 forward_backwards failed" in first.said[0]
    assert trainer.steps == 0
    monkeypatch.setattr(toy_trainer, "VOCABULARY", 100)
    monkeypatch.setattr(trainer, "theta", np.zeros((100, 100)))
    monkeypatch.setattr(trainer, "gradient", np.zeros((100, 100)))
    await Command(server, tmp_path, batches).step()
    assert trained(trainer) == [[[0, 1, 1, 1]], [[0, 2, 99, 2]], [[0, 3, 3, 3]], "step"]


TROUBLE = [
    errors.Overloaded("full"),
    errors.ShuttingDown("stops"),
    errors.InvalidApiKey("is not known"),
    errors.Internal("the stream was reset"),
]


@pytest.mark.parametrize("trouble", TROUBLE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_lost", [False, True], ids=["refused", "lost"])
async def test_a_batch_is_trained_once_whichever_of_its_commands_is_troubled(server, tmp_path, trouble, is_lost):
    """The discarding of the gradient, each pass, the step, and the publish; also if the trainer has it all the same."""
    trainer = server.trainer
    trainer.refusals = {seq_id: [trouble] for seq_id in (1, 4, 5, 9, 15)}
    if is_lost:
        trainer.refusals = {}
        trainer.replies_to_drop.update((1, 4, 5, 9, 12))
    for _ in range(10):
        with suppress(errors.PacelineError):
            await Command(server, tmp_path, [[group(*SEQUENCES)]]).step()
            break
    assert trained(trainer) == WHOLE


async def test_a_step_that_was_taken_though_its_answer_was_lost_is_not_taken_again(server, tmp_path):
    trainer = server.trainer
    trainer.replies_to_drop[6] = 1
    batches = [[group(*SEQUENCES)]]
    with pytest.raises(errors.UpstreamUnavailable):
        await Command(server, tmp_path, batches).step()
    await Command(server, tmp_path, batches).step()
    assert trained(trainer) == WHOLE
    assert trainer.executed.count("ForwardBackward") == len(SEQUENCES)
    assert trainer.executed[-1] == "PublishWeights"


@pytest.mark.parametrize("error", [errors.NonFiniteGradient("is NaN"), errors.NoGradient("none")], ids=repr)
async def test_a_batch_of_which_no_step_can_be_taken_is_dropped_and_said(server, tmp_path, error):
    batches, trainer = [[group(*SEQUENCES)], [group(*SEQUENCES)]], server.trainer
    trainer.step_errors = [error]
    command = Command(server, tmp_path, batches)
    await command.step()
    assert trainer.steps == 0
    assert "the batch is dropped" in command.said[0]
    await command.step()
    assert trained(trainer) == WHOLE


async def test_a_refusal_is_stored_while_later_answers_are_awaited(server, tmp_path):
    trainer = server.trainer
    trainer.places = asyncio.Semaphore(3)
    step = asyncio.create_task(Command(server, tmp_path, [[group(*REFUSED)]]).step())
    async with asyncio.timeout(PATIENCE):
        while not ((pulled := Progress(tmp_path).pulled()) and pulled.was_refused):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert trainer.executed.count("ForwardBackward") == 2
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
    assert trained(trainer)[-5:] == WHOLE


async def test_a_batch_of_which_everything_is_refused_again_is_dropped(server, tmp_path):
    refused = [[*tokens[:2], 99, 1, 1] for tokens in SEQUENCES]
    batches, trainer = [[group(*refused)], [group(*SEQUENCES)]], server.trainer
    with pytest.raises(errors.TokenOutOfRange):
        await Command(server, tmp_path, batches).step()
    again = Command(server, tmp_path, batches)
    await again.step()
    assert trainer.steps == 0
    await again.step()
    assert trained(trainer) == WHOLE

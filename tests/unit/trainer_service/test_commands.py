"""A batch is decoded and checked once, in a thread if it is large."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.stacks.journaled import NO_GUARD

from paceline import codec, errors
from paceline.requests.bodies import INLINE_BYTES
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Datum, ModelInfo, RunState
from trainer_service.commands import CommandExecutor
from trainer_service.engine_link.protocol import AccumulatedOutput
from trainer_service.rpc.command_messages import size_of
from trainer_service.runs.command import Command
from trainer_service.runs.progress import CommandProgress
from trainer_service.settings import TrainerSettings

RUN = SimpleNamespace(run_id="run", tenant="team", state=RunState.READY)


class Engine:
    """Notes the thread in which each batch is checked against its model, and answers with the batch's tokens."""

    def __init__(self):
        self.checked_in = []

    def describe(self):
        self.checked_in.append(threading.get_ident())
        return ModelInfo("tiny", 512, 256, "float32", 16, 2)

    async def forward_backward(self, run_id, data, spec):
        return AccumulatedOutput([{"logprobs": datum.loss_fn_inputs["weights"]} for datum in data], {})


@pytest.mark.parametrize(("datums", "is_here"), [(1, True), (1024, False)])
async def test_a_batch_is_decoded_and_checked_once_and_a_large_one_beside_the_event_loop(tmp_path, datums, is_here):
    engine = Engine()
    settings = TrainerSettings(model="tiny", checkpoint_dir=tmp_path, insecure=True)
    commands = CommandExecutor(settings, engine, None, None, None, NO_GUARD)
    tokens = np.arange(32, dtype=np.int64)
    datum = codec.datum_to_proto(Datum(tokens, {"target_tokens": tokens, "weights": np.ones(32, np.float32)}))
    request = pb.ForwardBackwardRequest(run_id="run", seq_id=1, loss_fn="cross_entropy", data=[datum] * datums)
    checked = await commands.check(RUN, Command.of(request, "team"))
    outcome = await commands.execute(RUN, checked, CommandProgress())
    assert len(outcome.answer.outputs) == datums
    assert [thread == threading.get_ident() for thread in engine.checked_in] == [is_here]


async def test_what_a_command_asks_for_is_held_once_while_it_waits(tmp_path):
    settings = TrainerSettings(model="tiny", checkpoint_dir=tmp_path, insecure=True)
    commands = CommandExecutor(settings, Engine(), None, None, None, NO_GUARD)
    tokens = np.arange(4, dtype=np.int64)
    datum = codec.datum_to_proto(Datum(tokens, {"target_tokens": tokens, "weights": np.ones(4, np.float32)}))
    request = pb.ForwardBackwardRequest(run_id="run", seq_id=1, loss_fn="cross_entropy", data=[datum])
    arrived = Command.of(request, "team")
    checked = await commands.check(RUN, arrived)
    assert (checked.request, checked.payload) == (None, arrived.payload)
    assert checked.journaled().payload == b""
    assert checked.journaled().content is checked.content
    refused = checked.refused(errors.InvalidArgument("no"))
    assert (refused.request, refused.payload, refused.content) == (None, b"", None)


def test_a_large_request_is_measured_no_further_than_to_tell_that_it_is_large():
    tokens = np.arange(1000, dtype=np.int64)
    datum = codec.datum_to_proto(Datum(tokens, {"target_tokens": tokens}))
    small = pb.ForwardBackwardRequest(run_id="run", seq_id=1, loss_fn="cross_entropy", data=[datum])
    assert size_of(small) == small.ByteSize() <= INLINE_BYTES
    large = pb.ForwardBackwardRequest(run_id="run", seq_id=1, loss_fn="cross_entropy", data=[datum] * 1000)
    assert INLINE_BYTES < size_of(large) < large.ByteSize() / 10
    assert size_of(step := pb.OptimStepRequest(run_id="run", seq_id=1)) == step.ByteSize()


async def test_a_command_read_from_the_journal_is_decoded_when_it_executes(tmp_path):
    engine = Engine()
    settings = TrainerSettings(model="tiny", checkpoint_dir=tmp_path, insecure=True)
    commands = CommandExecutor(settings, engine, None, None, None, NO_GUARD)
    tokens = np.arange(4, dtype=np.int64)
    datum = codec.datum_to_proto(Datum(tokens, {"target_tokens": tokens, "weights": np.ones(4, np.float32)}))
    request = pb.ForwardBackwardRequest(run_id="run", seq_id=1, loss_fn="cross_entropy", data=[datum])
    replayed = Command.from_record(Command.of(request, "team").to_record())
    assert len((await commands.execute(RUN, replayed, CommandProgress())).answer.outputs) == 1

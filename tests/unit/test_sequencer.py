"""A run's commands: in order of seq_id, each once."""

import asyncio

import pytest
from google.protobuf.wrappers_pb2 import Int64Value

from paceline import errors
from trainer_service.runs.sequencer import Sequencer


class Recorder:
    """Commands that note their execution."""

    def __init__(self):
        self.executed = []

    def command(self, number, error=None):
        async def run():
            await asyncio.sleep(0)
            self.executed.append(number)
            if error is not None:
                raise error
            return Int64Value(value=number)

        return run


@pytest.fixture
def recorder():
    return Recorder()


async def test_commands_execute_in_order_whatever_the_order_of_arrival(recorder):
    sequencer = Sequencer(0, 10)
    arrivals = [asyncio.create_task(sequencer.execute(n, b"%d" % n, recorder.command(n))) for n in (3, 1, 4, 2)]
    answers = await asyncio.gather(*arrivals)
    assert recorder.executed == [1, 2, 3, 4]
    assert [answer.value for answer in answers] == [3, 1, 4, 2]


async def test_a_repeated_command_gets_the_first_answer_and_is_not_executed_again(recorder):
    sequencer = Sequencer(0, 10)
    first = await sequencer.execute(1, b"same", recorder.command(1))
    again = await sequencer.execute(1, b"same", recorder.command(99))
    assert again == first
    assert recorder.executed == [1]


async def test_a_command_repeated_while_it_waits_is_executed_once(recorder):
    sequencer = Sequencer(0, 10)
    twice = [asyncio.create_task(sequencer.execute(2, b"b", recorder.command(2))) for _ in range(2)]
    await asyncio.sleep(0)
    await sequencer.execute(1, b"a", recorder.command(1))
    answers = await asyncio.gather(*twice)
    assert recorder.executed == [1, 2]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("executed_first", [True, False])
async def test_the_same_seq_id_with_another_payload_is_refused(recorder, executed_first):
    sequencer = Sequencer(0, 10)
    seq_id = 1 if executed_first else 2
    waiting = asyncio.create_task(sequencer.execute(seq_id, b"one", recorder.command(seq_id)))
    await asyncio.sleep(0.01)
    with pytest.raises(errors.SeqIdReused):
        await sequencer.execute(seq_id, b"other", recorder.command(seq_id))
    waiting.cancel()


async def test_a_refused_command_counts_as_executed_and_keeps_its_answer(recorder):
    sequencer = Sequencer(0, 10)
    refusal = errors.UnknownLoss("no such loss", field="loss_fn")
    for _ in range(2):
        with pytest.raises(errors.UnknownLoss):
            await sequencer.execute(1, b"bad", recorder.command(1, refusal))
    await sequencer.execute(2, b"good", recorder.command(2))
    assert recorder.executed == [1, 2]


async def test_an_unforeseen_failure_is_answered_with_an_id_and_holds_nothing_up(recorder):
    sequencer = Sequencer(0, 10)
    with pytest.raises(errors.Internal) as caught:
        await sequencer.execute(1, b"bad", recorder.command(1, ZeroDivisionError("secret")))
    assert "secret" not in str(caught.value)
    assert caught.value.metadata["error_id"] in str(caught.value)
    await sequencer.execute(2, b"good", recorder.command(2))


async def test_an_unavailable_engine_leaves_the_command_to_be_sent_again(recorder):
    sequencer = Sequencer(0, 10)
    with pytest.raises(errors.EngineUnavailable):
        await sequencer.execute(1, b"a", recorder.command(1, errors.EngineUnavailable("starting")))
    assert sequencer.last_seq_id == 0
    await sequencer.execute(1, b"a", recorder.command(1))
    assert sequencer.last_seq_id == 1


async def test_a_gap_waits_and_then_names_the_missing_command(recorder):
    sequencer = Sequencer(0, 0.05)
    with pytest.raises(errors.SeqIdGap) as caught:
        await sequencer.execute(3, b"c", recorder.command(3))
    assert caught.value.metadata == {"missing": "1"}
    assert recorder.executed == []


async def test_waiting_behind_a_long_command_is_no_gap(recorder):
    sequencer = Sequencer(0, 0.02)
    release = asyncio.Event()

    async def slow():
        await release.wait()
        return Int64Value(value=1)

    first = asyncio.create_task(sequencer.execute(1, b"a", slow))
    second = asyncio.create_task(sequencer.execute(2, b"b", recorder.command(2)))
    await asyncio.sleep(0.1)
    release.set()
    assert (await first).value == 1
    assert (await second).value == 2


async def test_a_command_goes_on_when_its_caller_leaves(recorder):
    sequencer = Sequencer(0, 10)
    release = asyncio.Event()

    async def slow():
        await release.wait()
        recorder.executed.append(1)
        return Int64Value(value=1)

    caller = asyncio.create_task(sequencer.execute(1, b"a", slow))
    await asyncio.sleep(0)
    caller.cancel()
    release.set()
    again = await sequencer.execute(1, b"a", recorder.command(99))
    assert (again.value, recorder.executed) == (1, [1])


async def test_an_answer_that_is_no_longer_kept_is_said_so_and_the_newest_always_is(recorder):
    sequencer = Sequencer(0, 10)

    async def large():
        from google.protobuf.wrappers_pb2 import BytesValue

        return BytesValue(value=bytes(40 << 20))

    for seq_id in (1, 2, 3):
        await sequencer.execute(seq_id, b"x", large)
    with pytest.raises(errors.SeqIdExpired):
        await sequencer.execute(1, b"x", large)
    assert len((await sequencer.execute(3, b"x", large)).value) == 40 << 20


async def test_rebase_goes_on_at_a_later_command_and_refuses_those_before(recorder):
    sequencer = Sequencer(5, 10)
    waiting = asyncio.create_task(sequencer.execute(8, b"w", recorder.command(8)))
    await asyncio.sleep(0)
    sequencer.rebase(20)
    with pytest.raises(errors.RunStateLost):
        await waiting
    await sequencer.execute(20, b"load", recorder.command(20))
    await sequencer.execute(21, b"next", recorder.command(21))
    assert recorder.executed == [20, 21]


async def test_seq_id_zero_is_refused(recorder):
    with pytest.raises(errors.MissingField, match="seq_id"):
        await Sequencer(0, 10).execute(0, b"", recorder.command(0))

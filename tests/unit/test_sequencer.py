"""A run's commands: in order of seq_id, each once."""

import asyncio

import pytest
from journaled import JournaledRun, blocked, refusal

from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.engine.base import EngineDiedError


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
async def run(directory):
    return JournaledRun(directory)


async def test_commands_execute_in_order_whatever_the_order_of_arrival(run):
    answers = await asyncio.gather(*(run.send(n) for n in (3, 1, 4, 2)))
    assert run.executor.ran == [1, 2, 3, 4]
    assert [answer.step for answer in answers] == [3, 1, 4, 2]


async def test_a_repeated_command_gets_the_first_answer_and_is_not_executed_again(run):
    first = await run.send(1)
    assert await run.send(1) == first
    assert run.executor.ran == [1]


async def test_a_command_repeated_while_it_waits_is_executed_once(run):
    twice = [run.send(2), run.send(2)]
    await asyncio.sleep(0)
    await run.send(1)
    answers = await asyncio.gather(*twice)
    assert run.executor.ran == [1, 2]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("executed_first", [True, False])
async def test_the_same_seq_id_with_another_payload_is_refused(run, executed_first):
    seq_id = 1 if executed_first else 2
    waiting = run.send(seq_id)
    await asyncio.wait({waiting}, timeout=0.05)
    with pytest.raises(errors.SeqIdReused):
        await run.send(seq_id, rate=2.0)
    waiting.cancel()


async def test_a_refused_command_counts_as_executed_and_keeps_its_answer(run):
    run.executor.act[1] = refusal(errors.UnknownLoss("no such loss", field="loss_fn"))
    for _ in range(2):
        with pytest.raises(errors.UnknownLoss):
            await run.send(1)
    await run.send(2)
    assert run.executor.ran == [2]


async def test_an_unforeseen_failure_is_answered_with_an_id_and_holds_nothing_up(run):
    run.executor.act[1] = refusal(ZeroDivisionError("secret"))
    with pytest.raises(errors.Internal) as caught:
        await run.send(1)
    assert "secret" not in str(caught.value)
    assert caught.value.metadata["error_id"] in str(caught.value)
    await run.send(2)


async def test_a_command_whose_engine_is_away_executes_when_it_is_back_and_tells_who_asks_again(run):
    run.executor.act[1] = refusal(errors.EngineUnavailable("starting"))
    with pytest.raises(errors.EngineUnavailable):
        await run.send(1)
    again = run.send(1)
    run.executor.act.clear()
    run.start()
    assert (await again).step == 1
    assert run.executor.ran == [1]


async def test_a_command_that_the_engine_dies_of_is_refused_for_good_and_the_next_executes(directory):
    died = refusal(EngineDiedError("the engine died"))
    for _ in range(2):  # the count survives the service
        run = JournaledRun(directory, started=False)
        run.executor.act[1] = died
        waiting = run.send(1)
        run.start()
        with pytest.raises(errors.EngineUnavailable):
            await waiting
        await run.sequencer.recover()
        await run.sequencer.close(errors.ShuttingDown("test"))
    run = JournaledRun(directory)
    with pytest.raises(errors.PoisonedCommand) as caught:
        await run.send(1)
    assert caught.value.metadata == {"attempts": "2"}
    await run.send(2)
    assert run.executor.ran == [2]


async def test_a_gap_waits_and_then_names_the_missing_command(directory):
    run = JournaledRun(directory, gap_wait=0.05)
    with pytest.raises(errors.SeqIdGap) as caught:
        await run.send(3)
    assert caught.value.metadata == {"missing": "1"}
    assert run.executor.ran == []
    assert run.history().commands == {}


async def test_waiting_behind_a_long_command_is_no_gap(directory):
    run = JournaledRun(directory, gap_wait=0.02)
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    first, second = run.send(1), run.send(2)
    await asyncio.wait({first, second}, timeout=0.1)
    release.set()
    assert [(await first).step, (await second).step] == [1, 2]


async def test_a_command_goes_on_when_its_caller_leaves(run):
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    caller = run.send(1)
    await asyncio.sleep(0)
    caller.cancel()
    release.set()
    assert (await run.send(1)).step == 1
    assert run.executor.ran == [1]


async def test_an_answer_that_is_no_longer_kept_is_said_so_and_the_newest_always_is(run):
    async def large():
        return pb.ForwardBackwardResponse(metrics={"x" * (40 << 20): 1.0})

    run.executor.act = dict.fromkeys((1, 2, 3), large)
    for seq_id in (1, 2, 3):
        await run.send(seq_id)
    with pytest.raises(errors.SeqIdExpired):
        await run.send(1)
    assert (await run.send(3)).ByteSize() > 40 << 20


async def test_rebase_goes_on_at_a_later_command_and_refuses_those_before(run):
    await run.send(1)
    waiting = run.send(8)
    await asyncio.sleep(0)
    await run.sequencer.rebase(20)
    with pytest.raises(errors.RunStateLost):
        await waiting
    await run.send(20)
    await run.send(21)
    assert run.executor.ran == [1, 20, 21]
    assert list(run.history().commands) == [20, 21]


async def test_a_draining_run_ends_what_executes_and_leaves_the_rest_to_the_next_start(directory):
    run = JournaledRun(directory)
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    first, second = run.send(1), run.send(2)
    await asyncio.wait({second}, timeout=0.5)
    run.sequencer.drain(errors.ShuttingDown("stopping"))
    for refused in (second, run.send(3)):
        with pytest.raises(errors.ShuttingDown):
            await refused
    release.set()
    assert (await first).step == 1
    await run.sequencer.close(errors.ShuttingDown("stopping"))
    assert list(run.history().commands) == [1, 2]
    again = JournaledRun(directory)
    assert (await again.send(2)).step == 2
    assert run.executor.ran == [1]


async def test_seq_id_zero_is_refused(run):
    with pytest.raises(errors.MissingField, match="seq_id"):
        await run.send(0)

"""What becomes of a command can be seen at every moment, and each change is told."""

import asyncio
from contextlib import aclosing

import pytest
from support.patience import PATIENCE
from support.stacks.journaled import JournaledRun, blocked, leave_runs, refusal  # noqa: F401 - a fixture

from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CommandState
from trainer_service.engine_link.protocol import EngineDiedError
from trainer_service.journal.format import CancelRecord
from trainer_service.runs.command import Command
from trainer_service.runs.pending import MAX_OUTSTANDING

NOT_ARRIVED, HELD, ACCEPTED = CommandState.NOT_ARRIVED, CommandState.HELD, CommandState.ACCEPTED
EXECUTING, SUCCEEDED, REFUSED = CommandState.EXECUTING, CommandState.SUCCEEDED, CommandState.REFUSED


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
async def run(directory):
    return JournaledRun(directory)


def step(seq_id, rate=1e-3, attachment=0):
    request = pb.OptimStepRequest(run_id="run", seq_id=seq_id, attachment=attachment)
    request.adamw.learning_rate = rate
    return Command.of(request, "team")


async def submitted(run, command):
    """Return the states of a command as they come, the first at the head."""
    stream = await run.sequencer.submit(command)
    return aclosing(stream), stream.statuses()


async def state_of(run, seq_id):
    async with aclosing(run.sequencer.follow([seq_id])) as stream, aclosing(stream.statuses(0)) as statuses:
        return await anext(statuses)


async def reaches(run, seq_id, state):
    """Wait until a command has a state, and return its status."""
    async with asyncio.timeout(PATIENCE):
        while (status := await state_of(run, seq_id)).state is not state:  # noqa: ASYNC110 - any state
            await asyncio.sleep(0)
    return status


async def test_each_state_is_told_from_acceptance_to_the_answer(run):
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    assert (await state_of(run, 1)).state is NOT_ARRIVED
    stream, states = await submitted(run, step(1))
    async with stream:
        seen = [(await anext(states)).state]
        while seen[-1] is not EXECUTING:  # changes that come at once are told as one
            seen.append((await anext(states)).state)
        assert set(seen) <= {ACCEPTED, EXECUTING}
        release.set()
        last = await anext(states)
        assert (last.state, last.answer.step) == (SUCCEEDED, 1)
        with pytest.raises(StopAsyncIteration):
            await anext(states)
    after = await state_of(run, 1)
    assert (after.state, after.answer, after.digest) == (SUCCEEDED, last.answer, step(1).digest)


async def test_a_command_behind_a_gap_is_held_and_says_what_is_missing(run):
    stream, states = await submitted(run, step(3))
    async with stream:
        held = await anext(states)
        assert (held.state, held.missing_seq_id) == (HELD, 1)
        await run.send(1)
        assert (await state_of(run, 3)).missing_seq_id == 2
        await run.send(2)
        assert [status.state async for status in states][-1] is SUCCEEDED


async def test_a_gap_that_lasts_frees_the_command_and_says_why(directory):
    run = JournaledRun(directory, gap_wait=0.05)
    stream, states = await submitted(run, step(2))
    async with stream:
        assert (await anext(states)).state is HELD
        given_up = await anext(states)
        assert given_up.state is NOT_ARRIVED
        assert isinstance(given_up.answer, errors.SeqIdGap)
    assert (await state_of(run, 2)).state is NOT_ARRIVED


async def test_an_engine_s_death_is_a_state_and_not_an_error(run):
    died = asyncio.Event()

    async def die():
        await died.wait()
        raise EngineDiedError("the engine died")

    run.executor.act[1] = die
    stream, states = await submitted(run, step(1))
    async with stream:
        while (await anext(states)).state is not EXECUTING:
            pass
        died.set()
        assert (await anext(states)).state is ACCEPTED
        run.executor.act.clear()
        await run.recover()
        assert [status.state async for status in states][-1] is SUCCEEDED


async def test_refused_input_is_told_at_once_and_keeps_its_place(run):
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    first = run.send(1)
    await reaches(run, 1, EXECUTING)
    bad = step(2).refused(errors.OutOfRange("is bad", field="x"))
    stream, states = await submitted(run, bad)
    async with stream:
        refused = await anext(states)
        assert refused.state is REFUSED
        assert refused.answer.field == "x"
    third = run.send(3)
    await reaches(run, 3, ACCEPTED)
    release.set()
    await first
    await third
    assert run.executor.ran == [1, 3]
    assert (await state_of(run, 2)).answer.field == "x"


async def test_another_command_with_the_seq_id_is_told_from_the_same_one(run):
    await run.send(1)
    stream, states = await submitted(run, step(1, rate=2.0))
    async with stream:
        (status,) = [status async for status in states]
    assert status.is_another
    assert status.digest == step(1).digest
    assert status.answer is None


async def test_the_attachment_is_told_and_is_no_part_of_the_digest(run):
    run.sequencer.attach(3)
    await run.send(1, attachment=3)
    status = await state_of(run, 1)
    assert (status.attachment, status.digest) == (3, step(1).digest)
    assert step(1, attachment=3).digest == step(1).digest


async def test_a_reader_that_waits_no_time_gets_the_present_states(directory):
    run = JournaledRun(directory, started=False)
    sent = [run.send(1), run.send(2), run.send(4)]
    await reaches(run, 2, ACCEPTED)
    async with aclosing(run.sequencer.follow([1, 2, 3, 4])) as stream:
        found = [(one.seq_id, one.state, one.commands_ahead) async for one in stream.statuses(0)]
    assert found == [(1, ACCEPTED, 0), (2, ACCEPTED, 1), (3, NOT_ARRIVED, 0), (4, HELD, 2)]
    assert run.sequencer.outstanding == [1, 2, 4]
    for task in sent:
        task.cancel()


async def test_what_has_not_started_is_cancelled_for_good_and_the_rest_goes_on(directory):
    run = JournaledRun(directory)
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    first, second, third = run.send(1), run.send(2), run.send(4)
    await reaches(run, 1, EXECUTING)
    await reaches(run, 2, ACCEPTED)
    await run.sequencer.cancel_waiting(1)
    with pytest.raises(errors.CommandCancelled):
        await second
    with pytest.raises(errors.ClientSuperseded):
        await third
    again = JournaledRun(directory, started=False)  # as after a kill
    status = await state_of(again, 2)
    assert (status.state, type(status.answer)) == (REFUSED, errors.CommandCancelled)
    release.set()
    await first
    await run.send(3)
    assert run.executor.ran == [1, 3]
    assert isinstance((await state_of(run, 2)).answer, errors.CommandCancelled)


async def test_a_clients_own_commands_are_not_cancelled_with_those_of_others(directory):
    run = JournaledRun(directory, started=False)
    run.sequencer.attach(1)
    sent = [run.send(1), run.send(2, attachment=1)]
    await reaches(run, 2, ACCEPTED)
    run.sequencer.attach(2)
    sent += [run.send(3, attachment=2), run.send(5, attachment=2)]
    await reaches(run, 3, ACCEPTED)
    await reaches(run, 5, HELD)
    assert run.sequencer.left_to(2) == [1, 2]
    await run.sequencer.cancel_waiting(2)
    states = [(await state_of(run, seq_id)).state for seq_id in (1, 2, 3, 5)]
    assert states == [REFUSED, REFUSED, ACCEPTED, HELD]
    assert run.sequencer.left_to(2) == [1, 2], "they have not taken their places"
    run.start()
    await reaches(run, 3, SUCCEEDED)
    assert run.sequencer.left_to(2) == []
    for task in sent:
        task.cancel()


async def test_a_command_that_is_cancelled_while_it_is_written_is_refused_when_that_is_durable(directory, monkeypatch):
    run, may_be_written = JournaledRun(directory, started=False), asyncio.Event()
    append = run.journal.append

    async def append_later(record):
        await may_be_written.wait()
        await append(record, sync=True)

    def append_cancels_later(record, *, sync):
        is_cancel = isinstance(record, CancelRecord)
        return asyncio.ensure_future(append_later(record)) if is_cancel else append(record, sync=sync)

    monkeypatch.setattr(run.journal, "append", append_cancels_later)
    sent = run.send(1)
    await asyncio.sleep(0)  # from now on it is being written
    cancelling = asyncio.ensure_future(run.sequencer.cancel_waiting(1))
    await reaches(run, 1, ACCEPTED)
    may_be_written.set()
    await cancelling
    with pytest.raises(errors.CommandCancelled):
        await sent


async def test_a_run_takes_no_more_commands_than_it_may_hold_and_the_missing_one_always(directory):
    run = JournaledRun(directory, started=False)
    sent = [run.send(seq_id) for seq_id in range(2, MAX_OUTSTANDING + 1)]
    await reaches(run, MAX_OUTSTANDING, HELD)
    with pytest.raises(errors.Overloaded) as caught:
        await run.send(MAX_OUTSTANDING + 1)
    assert caught.value.retry_after
    sent.append(run.send(1))
    await reaches(run, MAX_OUTSTANDING, ACCEPTED)
    with pytest.raises(errors.Overloaded):
        await run.send(MAX_OUTSTANDING + 1)
    run.start()
    await asyncio.gather(*sent)
    await run.send(MAX_OUTSTANDING + 1)


async def test_a_closed_run_ends_the_streams_of_what_it_has_not_ended(directory):
    run = JournaledRun(directory, started=False)
    stream, states = await submitted(run, step(1))
    async with stream:
        assert (await anext(states)).state is ACCEPTED
        await run.sequencer.close(errors.ShuttingDown("test"))
        with pytest.raises(errors.ShuttingDown):
            await anext(states)
    again = JournaledRun(directory)
    assert (await reaches(again, 1, SUCCEEDED)).answer.step == 1


async def test_an_answer_that_is_no_longer_kept_is_told_as_such(directory):
    run = JournaledRun(directory, kept_bytes=0)
    run.executor.act[1] = refusal(errors.NoGradient("none"))
    with pytest.raises(errors.NoGradient):
        await run.send(1)
    await run.send(2)
    await run.send(3)  # the newest is kept whatever its size
    refused, expired = await state_of(run, 1), await state_of(run, 2)
    assert (refused.state, refused.answer_expired) == (REFUSED, False)
    assert (expired.state, expired.answer, expired.answer_expired) == (SUCCEEDED, None, True)


async def test_replies_are_read_one_by_one_so_that_a_slow_reader_keeps_none_in_memory(directory):
    run = JournaledRun(directory, kept_bytes=0)
    await run.send(1)
    await run.send(2)
    async with aclosing(run.sequencer.follow([1, 2])) as stream, aclosing(stream.statuses()) as statuses:
        assert (await anext(statuses)).seq_id == 1
        await run.send(3)  # the newest is kept, and no other
        second = await anext(statuses)
    assert (second.seq_id, second.answer, second.answer_expired) == (2, None, True)


async def test_a_command_that_is_durable_as_its_turn_comes_is_accepted_first(run, monkeypatch):
    append = run.journal.append

    def append_soon(record, *, sync):
        append(record, sync=sync)
        loop = asyncio.get_running_loop()
        durable = loop.create_future()
        loop.call_soon(durable.set_result, None)  # in the turn of the loop in which the command's task begins
        return durable

    monkeypatch.setattr(run.journal, "append", append_soon)
    assert [(await run.send(seq_id)).step for seq_id in (1, 2)] == [1, 2]


async def test_a_durable_command_is_never_said_not_to_have_arrived_while_the_service_stops(run):
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    for seq_id in (1, 2):
        stream, _ = await submitted(run, step(seq_id))
        async with stream:
            pass
    await reaches(run, 1, EXECUTING)
    assert run.sequencer.is_awaited is False
    run.sequencer.drain(errors.ShuttingDown("stopping"))
    with pytest.raises(errors.ShuttingDown):
        await state_of(run, 2)
    assert (await state_of(run, 1)).state is EXECUTING
    release.set()


async def test_a_run_is_awaited_while_a_command_is_followed(run):
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    stream, _ = await submitted(run, step(1))
    async with stream:
        assert run.sequencer.is_awaited
    assert not run.sequencer.is_awaited
    release.set()

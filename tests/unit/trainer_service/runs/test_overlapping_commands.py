"""Commands that only read a run's state: the next starts once they have captured it, and a crash loses none."""

import asyncio

import pytest
from support.stacks.journaled import JournaledRun, leave_runs, refusal  # noqa: F401 - a fixture

from paceline import errors
from trainer_service.engine_link.protocol import EngineDiedError
from trainer_service.journal.format import AnswerRecord


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
async def run(directory):
    return JournaledRun(directory)


class Background:
    """What a command does after capturing the run's state, until the test lets it end."""

    def __init__(self, error=None, *, needs_engine=True, ordered=False):
        self.error, self.needs_engine, self.ordered = error, needs_engine, ordered
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, turn):
        if not self.needs_engine:
            turn.release()
        self.began.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        if self.ordered:
            await turn.wait_for_earlier()


async def test_the_next_command_begins_when_the_state_is_captured_and_the_answer_comes_when_it_is_durable(run):
    rest = run.executor.rest[2] = Background()
    await run.send(1)
    saving = run.save(2)
    assert (await run.send(3)).step == 3
    assert not saving.done()
    assert list(run.history().answers) == [1, 3]
    rest.may_end.set()
    await saving
    assert list(run.history().answers) == [1, 3, 2]


async def test_a_command_under_way_is_joined_when_it_is_repeated_and_another_payload_is_refused(run):
    rest = run.executor.rest[1] = Background()
    first = run.save(1)
    await run.send(2)
    again = run.save(1)
    with pytest.raises(errors.SeqIdReused):
        await run.send(1)
    rest.may_end.set()
    assert await first == await again == await run.save(1)
    assert run.executor.ran == [1, 2]


async def test_the_journal_says_what_held_at_a_commands_place_whenever_it_is_answered(run):
    rest = run.executor.rest[1] = Background()
    saving = run.save(1)
    await run.send(2)
    rest.may_end.set()
    await saving
    steps = {seq_id: record.counters.step for seq_id, record in run.history().answers.items()}
    assert steps == {1: 1, 2: 2}


async def test_after_a_restart_a_command_that_others_overtook_executes_again_at_its_place(directory):
    before = JournaledRun(directory)
    before.executor.rest = {1: Background(), 3: Background()}
    waiting = [before.save(1), before.send(2), before.save(3), before.send(4)]
    await asyncio.wait(waiting, timeout=1)
    assert list(before.history().answers) == [2, 4]
    after = JournaledRun(directory, started=False)
    assert after.sequencer.overtaken == [1, 3]
    assert after.sequencer.last_seq_id == 4
    again = after.save(1)
    await after.recover()
    assert (await after.send(5)).step == 5
    await again
    await after.save(3)
    assert after.executor.ran == [1, 3, 5]
    assert sorted(after.history().answers) == [1, 2, 3, 4, 5]
    for rest in before.executor.rest.values():
        rest.may_end.set()


async def test_when_the_engine_dies_what_it_was_writing_executes_again_and_what_needs_it_no_more_goes_on(run):
    died = EngineDiedError("the engine died")
    lost, safe = Background(died), Background(needs_engine=False)
    run.executor.rest = {1: safe, 3: lost}
    answers = [run.save(1), run.send(2), run.save(3), run.send(4)]
    await answers[3]
    run.executor.act[5] = refusal(died)
    lost.may_end.set()
    await run.held()
    del run.executor.rest[3]
    await run.recover()
    await answers[2]
    assert run.executor.ran == [1, 2, 3, 4, 3]
    assert not answers[0].done()
    safe.may_end.set()
    await answers[0]
    assert sorted(run.history().answers) == [1, 2, 3, 4]


async def test_commands_that_executed_last_execute_again_in_order_without_a_replay(run):
    died = EngineDiedError("the engine died")
    lost = run.executor.rest[1] = Background(died)
    run.executor.act[2] = refusal(died)
    answers = [run.save(1), run.send(2)]
    await lost.began.wait()
    lost.may_end.set()
    await run.held()
    run.executor.act.clear()
    run.executor.rest.clear()
    await run.sequencer.recover()
    assert run.sequencer.overtaken == []
    assert run.sequencer.executed == 0
    run.start()
    await asyncio.gather(*answers)
    assert run.executor.ran == [1, 1, 2]


async def test_a_command_of_the_same_kind_can_wait_until_those_before_it_are_answered(run):
    first = run.executor.rest[1] = Background()
    second = run.executor.rest[2] = Background(ordered=True)
    answers = [run.save(1), run.save(2)]
    second.may_end.set()
    await asyncio.wait(answers, timeout=0.1)
    assert run.executor.ended == []
    first.may_end.set()
    await asyncio.gather(*answers)
    assert list(run.history().answers) == [1, 2]


async def test_a_command_that_replaces_the_run_waits_until_all_before_it_are_answered(run):
    rest = run.executor.rest[1] = Background()
    saving, loading = run.save(1), run.load(2)
    await rest.began.wait()
    await asyncio.wait({loading}, timeout=0.1)
    assert run.executor.ran == [1]
    rest.may_end.set()
    await asyncio.gather(saving, loading)
    assert list(run.history().answers) == [1, 2]


async def test_no_more_than_a_few_commands_are_under_way(run):
    run.executor.rest = {seq_id: Background() for seq_id in range(1, 21)}
    answers = [run.save(seq_id) for seq_id in range(1, 21)]
    await asyncio.gather(*(run.executor.rest[seq_id].began.wait() for seq_id in range(1, 9)))
    await asyncio.wait(answers, timeout=0.2)
    assert len(run.executor.ran) == 8
    for rest in run.executor.rest.values():
        rest.may_end.set()
    await asyncio.gather(*answers)


async def test_a_snapshot_waits_for_the_commands_up_to_it_and_is_given_up_with_the_engine(run):
    rest = run.executor.rest[1] = Background()
    saving = run.save(1)
    await run.send(2)
    complete = asyncio.ensure_future(run.sequencer.answered(2, run.executor))
    await asyncio.wait({complete}, timeout=0.1)
    assert not complete.done()
    rest.may_end.set()
    await saving
    await complete
    rest = run.executor.rest[3] = Background(needs_engine=False)
    saving = run.save(3)
    await run.send(4)
    given_up = asyncio.ensure_future(run.sequencer.answered(4, run.executor))
    await asyncio.sleep(0)
    run.sequencer.pause()
    with pytest.raises(errors.EngineUnavailable):
        await given_up
    rest.may_end.set()
    await saving


async def test_a_closed_run_waits_for_what_is_under_way(run):
    rest = run.executor.rest[1] = Background()
    saving = run.save(1)
    await run.send(2)
    closing = asyncio.ensure_future(run.sequencer.close(errors.ShuttingDown("test")))
    await asyncio.wait({closing}, timeout=0.1)
    assert not closing.done()
    rest.may_end.set()
    await closing
    await saving
    assert isinstance(run.history().answers[1], AnswerRecord)


async def test_a_full_disk_takes_back_no_command_that_others_overtook(run):
    rest = run.executor.rest[1] = Background()
    saving = run.save(1)
    await run.send(2)
    run.journal.on_refused(errors.DiskFull("full"), [])
    assert run.sequencer.last_seq_id == 2
    rest.may_end.set()
    await saving

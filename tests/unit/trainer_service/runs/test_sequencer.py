"""A run's commands execute in order of seq_id, each once."""

import asyncio
import gc
import weakref
from datetime import UTC, datetime

import pytest
from support.patience import PATIENCE
from support.stacks.journaled import JournaledRun, blocked, leave_runs, refusal  # noqa: F401 - a fixture

from paceline import errors
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import LoraConfig
from trainer_service.engine_link.protocol import EngineDiedError
from trainer_service.runs.command import Command
from trainer_service.runs.record import RunRecord


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
async def run(directory):
    return JournaledRun(directory)


def command_of(seq_id, attachment=0):
    request = pb.OptimStepRequest(run_id="run", seq_id=seq_id, attachment=attachment)
    request.adamw.learning_rate = 1e-3
    return Command.of(request, "team")


async def settled(is_so):
    """Run the event loop, and collect garbage, until `is_so()` is true."""
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0)
            gc.collect()


async def test_commands_execute_in_order_whatever_the_order_of_arrival(run):
    answers = await asyncio.gather(*(run.send(n) for n in (3, 1, 4, 2)))
    assert run.executor.ran == [1, 2, 3, 4]
    assert [answer.step for answer in answers] == [3, 1, 4, 2]


async def test_a_repeated_command_gets_the_first_answer_and_is_not_executed_again(run):
    first = await run.send(1)
    assert await run.send(1) == first
    assert run.executor.ran == [1]


async def test_a_command_that_arrives_twice_while_it_is_checked_is_executed_once(run):
    entered, checked = asyncio.Semaphore(0), asyncio.Event()

    async def check(command):
        entered.release()
        await checked.wait()
        return command

    twice = [asyncio.create_task(run.sequencer.execute(command_of(1), check)) for _ in range(2)]
    for _ in twice:
        await entered.acquire()
    checked.set()
    first, second = await asyncio.gather(*twice)
    assert first == second
    assert run.executor.ran == [1]


async def test_a_command_that_is_checked_while_the_run_closes_is_refused(run):
    checked = asyncio.Event()

    async def check(command):
        await checked.wait()
        return command

    late = asyncio.create_task(run.sequencer.execute(command_of(1), check))
    await asyncio.sleep(0)
    await run.sequencer.close(errors.RunNotFound("deleted"))
    checked.set()
    with pytest.raises(errors.RunNotFound):
        await late
    assert run.executor.ran == []


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


async def test_a_command_whose_engine_dies_executes_again_when_it_is_back_and_its_callers_wait(run):
    run.executor.act[1] = refusal(errors.EngineUnavailable("starting"))
    first, again = run.send(1), run.send(1)
    await run.held()
    assert not first.done()
    run.executor.act.clear()
    run.start()
    assert (await first).step == (await again).step == 1
    assert run.executor.ran == [1]


async def test_a_command_that_the_engine_dies_of_is_refused_for_good_and_the_next_executes(directory):
    died = refusal(EngineDiedError("the engine died"))
    for attempt in (1, 2):  # the count survives a restart
        run = JournaledRun(directory, started=False)
        run.executor.act[1] = died
        waiting = run.send(1)
        run.start()
        await settled(lambda attempt=attempt, run=run: run.history().attempts[1] == attempt)
        await run.sequencer.recover()
        await run.sequencer.close(errors.ShuttingDown("test"))
        with pytest.raises(errors.ShuttingDown):
            await waiting
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


async def test_an_answered_command_is_not_kept_for_the_time_that_gaps_may_take(directory):
    run = JournaledRun(directory, gap_wait=3600.0)
    commands = [command_of(seq_id) for seq_id in (2, 1)]
    kept = [weakref.ref(command) for command in commands]
    await asyncio.gather(*map(run.sequencer.execute, commands))
    commands.clear()
    await settled(lambda: not any(ref() for ref in kept))


async def test_a_command_that_was_refused_while_it_waited_is_not_kept_either(directory):
    run = JournaledRun(directory, gap_wait=3600.0)
    run.sequencer.attach(1)
    command = command_of(2, attachment=1)
    kept = weakref.ref(command)
    waiting = asyncio.create_task(run.sequencer.execute(command))
    await asyncio.sleep(0)
    run.sequencer.attach(2)
    with pytest.raises(errors.ClientSuperseded):
        await waiting
    del command, waiting
    await settled(lambda: kept() is None)


async def test_a_command_refused_as_it_comes_keeps_its_place_and_answer_and_leaves_nothing_in_the_journal(directory):
    for _ in range(2):  # also after a restart
        run = JournaledRun(directory)
        second = run.send_large(2, 1 << 20, refusal=errors.TokenOutOfRange("holds -1", field="data[0].model_input"))
        first = run.send(1)
        with pytest.raises(errors.TokenOutOfRange) as caught:
            await second
        assert caught.value.field == "data[0].model_input"
        await first
        await run.send(3)
        with pytest.raises(errors.SeqIdReused):
            await run.send(2)
        await run.sequencer.close(errors.ShuttingDown("test"))
        assert sum(path.stat().st_size for path in directory.iterdir()) < 1 << 15
    assert run.executor.ran == []


async def test_a_command_refused_as_it_came_answers_so_after_a_crash_too(directory):
    run = JournaledRun(directory, started=False)
    waiting = run.send_large(1, refusal=errors.TokenOutOfRange("holds -1"))
    await settled(lambda: run.history().commands)
    waiting.cancel()
    run = JournaledRun(directory)
    with pytest.raises(errors.TokenOutOfRange, match="holds -1"):
        await run.send_large(1)
    await run.send(2)


async def test_bytes_that_wait_are_bounded_and_the_command_that_is_missing_is_taken(directory):
    waiting_bytes = WaitingBytes(tenant_limit=10_000)
    run = JournaledRun(directory, waiting_bytes=waiting_bytes)
    behind = [run.send_large(seq_id, 4000) for seq_id in (3, 2)]
    await asyncio.sleep(0)
    with pytest.raises(errors.QuotaExceeded) as caught:
        await run.send_large(4, 4000)
    used = waiting_bytes.used("team")
    assert 8000 < used < 9000
    assert caught.value.metadata == {"quota": "waiting_bytes", "used": str(used), "limit": "10000"}
    assert caught.value.retry_after, "the client sends it again"
    await asyncio.gather(run.send_large(1, 1 << 20), *behind)
    assert waiting_bytes.used("team") == 0
    await run.send_large(4, 4000)


async def test_a_refused_command_counts_whole_while_its_call_waits(directory):
    waiting_bytes = WaitingBytes()
    run = JournaledRun(directory, waiting_bytes=waiting_bytes)
    waiting = run.send_large(2, 1 << 20, refusal=errors.TokenOutOfRange("holds -1"))
    await asyncio.sleep(0)
    assert waiting_bytes.used("team") > 1 << 20
    await run.send(1)
    with pytest.raises(errors.TokenOutOfRange):
        await waiting
    assert waiting_bytes.used("team") == 0


async def test_bytes_that_wait_are_counted_over_runs_and_tenants(directory):
    waiting_bytes = WaitingBytes(limit=10_000)
    waiting_bytes.add("other", 7000)  # of another run
    run = JournaledRun(directory, started=False, waiting_bytes=waiting_bytes)
    first = run.send_large(1, 6000)  # the command that the run needs next
    await settled(lambda: run.history().commands)
    with pytest.raises(errors.Overloaded) as caught:
        await run.send_large(2, 1)
    assert caught.value.retry_after
    waiting_bytes.remove("other", 7000)
    second = run.send_large(2, 1)
    run.start()
    await asyncio.gather(first, second)
    assert waiting_bytes.tenants() == []


@pytest.mark.parametrize("how", ["superseded", "given up", "drained"])
async def test_commands_that_are_given_up_wait_no_longer(directory, how):
    waiting_bytes = WaitingBytes()
    run = JournaledRun(directory, gap_wait=0.02 if how == "given up" else 3600, waiting_bytes=waiting_bytes)
    run.sequencer.attach(1)
    waiting = run.send(2, attachment=1)
    await asyncio.sleep(0)
    assert waiting_bytes.used("team")
    if how == "superseded":
        run.sequencer.attach(2)
    elif how == "drained":
        run.sequencer.drain(errors.ShuttingDown("test"))
    with pytest.raises((errors.ClientSuperseded, errors.SeqIdGap, errors.ShuttingDown)):
        await waiting
    assert waiting_bytes.used("team") == 0


async def test_commands_of_a_journal_are_counted_when_it_is_read_again(directory):
    run = JournaledRun(directory, started=False)
    waiting = run.send_large(1, 5000)
    await settled(lambda: run.history().commands)
    waiting.cancel()
    waiting_bytes = WaitingBytes()
    run = JournaledRun(directory, waiting_bytes=waiting_bytes)
    assert waiting_bytes.used("team") > 5000
    await run.send_large(1, 5000)
    assert waiting_bytes.used("team") == 0


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


async def test_a_command_that_arrived_before_the_rebase_to_it_is_executed(run):
    await run.send(1)
    early, later = run.send(20), run.send(21)
    await asyncio.sleep(0)
    await run.sequencer.rebase(20)
    await asyncio.wait_for(asyncio.gather(early, later), 10)
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


async def test_a_command_refused_by_a_drain_while_it_becomes_durable_executes_at_the_next_start_only(directory):
    run = JournaledRun(directory)
    answer = run.send(1)
    await asyncio.sleep(0)
    assert run.sequencer.last_seq_id == 1
    run.sequencer.drain(errors.ShuttingDown("stopping"))
    with pytest.raises(errors.ShuttingDown):
        await answer
    await run.sequencer.save()
    await run.sequencer.close(errors.ShuttingDown("stopping"))
    assert run.executor.ran == []
    again = JournaledRun(directory)
    assert (await again.send(1)).step == 1
    assert again.executor.ran == [1]


async def test_seq_id_zero_is_refused(run):
    with pytest.raises(errors.MissingField, match="seq_id"):
        await run.send(0)


async def test_a_client_that_another_one_followed_is_refused_and_its_seq_id_is_free(run):
    run.sequencer.attach(1)
    await run.send(1, attachment=1)
    run.sequencer.attach(2)
    with pytest.raises(errors.ClientSuperseded) as caught:
        await run.send(2, attachment=1)
    assert caught.value.field == "attachment"
    await run.send(2, attachment=2)
    assert run.executor.ran == [1, 2]


async def test_the_same_command_of_two_clients_executes_once_and_both_get_its_answer(run):
    run.sequencer.attach(1)
    release = asyncio.Event()
    run.executor.act[1] = blocked(release)
    first = run.send(1, attachment=1)
    await asyncio.sleep(0)
    run.sequencer.attach(2)
    second = run.send(1, attachment=2)
    with pytest.raises(errors.SeqIdReused):
        await run.send(1, rate=2.0, attachment=2)
    release.set()
    assert await first == await second
    assert run.executor.ran == [1]


async def test_a_client_that_another_one_followed_still_gets_the_answers_of_what_was_accepted(run):
    run.sequencer.attach(1)
    release = asyncio.Event()
    run.executor.act[2] = blocked(release)
    answered, running = await run.send(1, attachment=1), run.send(2, attachment=1)
    await asyncio.sleep(0)
    run.sequencer.attach(2)
    assert await run.send(1, attachment=1) == answered
    again = run.send(2, attachment=1)
    release.set()
    assert await again == await running
    assert run.executor.ran == [1, 2]


async def test_an_equal_command_of_the_client_that_attached_since_is_not_the_earlier_ones(run):
    run.sequencer.attach(1)
    run.sequencer.attach(2)
    release = asyncio.Event()
    run.executor.act[2] = blocked(release)
    await run.send(1, attachment=2)
    running = run.send(2, attachment=2)
    await asyncio.sleep(0)
    for seq_id in (1, 2):
        with pytest.raises(errors.ClientSuperseded):
            await run.send(seq_id, attachment=1)
    release.set()
    await running


async def test_what_waits_behind_a_gap_goes_with_its_client(run):
    run.sequencer.attach(1)
    waiting = run.send(2, attachment=1)
    await asyncio.sleep(0)
    run.sequencer.attach(2)
    with pytest.raises(errors.ClientSuperseded):
        await waiting
    await asyncio.gather(run.send(1, attachment=2), run.send(2, attachment=2))
    assert run.executor.ran == [1, 2]


async def test_callers_that_did_not_attach_are_served_as_ever(run):
    run.sequencer.attach(7)
    first = await run.send(1)
    assert await run.send(1) == first


async def test_a_number_that_nobody_was_given_is_refused(run):
    with pytest.raises(errors.InvalidArgument) as caught:
        await run.send(1, attachment=1)
    assert caught.value.field == "attachment"


async def test_who_attached_last_outlives_the_service(run, tmp_path):
    record = RunRecord(
        run_id="run-" + "0" * 32,
        tenant="team",
        base_model="tiny",
        parameters=LoraConfig(rank=4),
        create_time=datetime(2030, 1, 1, tzinfo=UTC),
        trainable_parameters=1,
        request_id="made",
        request_digest="f0",
        sequencer=run.sequencer,
        snapshots=None,
        attachment=2,
        attached={"first": 1, "second": 2},
    )
    again = JournaledRun(tmp_path / "again")
    restored = RunRecord.from_run_file(record.to_run_file(), again.sequencer, None)
    assert (restored.attachment, restored.attached) == (2, {"first": 1, "second": 2})
    with pytest.raises(errors.ClientSuperseded):
        await again.send(1, attachment=1)
    await again.send(1, attachment=2)


async def test_a_command_during_which_the_engine_dies_while_its_run_is_deleted_counts_no_more(directory):
    waiting_bytes, executes, dies = WaitingBytes(), asyncio.Event(), asyncio.Event()
    run = JournaledRun(directory, waiting_bytes=waiting_bytes)

    async def die():
        executes.set()
        await dies.wait()
        raise EngineDiedError("the engine died")

    run.executor.act[1] = die
    sending = run.send(1)
    await executes.wait()
    assert waiting_bytes.used("team")
    closing = asyncio.create_task(run.sequencer.close(errors.RunNotFound("the run was deleted")))
    await asyncio.sleep(0)
    dies.set()
    await closing
    assert waiting_bytes.used("team") == 0
    with pytest.raises(errors.PacelineError):
        await sending

"""Futures: what they say of themselves, and to those that wait too short or forget to wait."""

import asyncio
import logging
import pickle
from concurrent.futures import Future
from copy import copy

import pytest

from paceline import errors
from paceline.client import futures
from paceline.client.futures import CommandOrder, IssuedCommand, PacelineFuture, UnansweredCommands


def test_a_wait_that_ends_too_early_says_after_how_long_and_that_the_call_goes_on():
    answer = Future()
    future = PacelineFuture(answer)
    with pytest.raises(TimeoutError, match=r"^no answer within 0 s; the call goes on$"):
        future.result(timeout=0)
    answer.set_exception(TimeoutError("the call's own"))
    with pytest.raises(TimeoutError, match=r"^the call's own$"):
        future.result(timeout=0)


async def test_a_wait_in_an_event_loop_can_end_too_early_too_and_the_call_goes_on():
    answer = Future()
    future = PacelineFuture(answer)
    with pytest.raises(TimeoutError, match=r"^no answer within 0 s; the call goes on$"):
        await future.result_async(timeout=0)
    assert not answer.cancelled()
    waiting = asyncio.create_task(future.result_async())
    await asyncio.sleep(0)
    answer.set_result(7)
    assert await waiting == await future.result_async(timeout=0) == 7


async def test_a_task_that_is_cancelled_cancels_the_call_that_it_waits_for():
    answer = Future()
    waiting = asyncio.create_task(PacelineFuture(answer).result_async(timeout=600))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert answer.cancelled()


def test_an_attribute_of_the_answer_is_told_to_wait_for_the_answer():
    future = PacelineFuture(Future())
    with pytest.raises(AttributeError, match=r"'sequences'; call \.result\(\) or await it for the answer$"):
        _ = future.sequences
    assert not hasattr(future, "sequences")
    with pytest.raises(AttributeError, match=r"no attribute '__array__'$"):
        _ = future.__array__


def test_a_future_cannot_be_copied_or_pickled_and_says_so():
    for send in (copy, pickle.dumps):
        with pytest.raises(errors.Unsupported, match="send its result"):
            send(PacelineFuture(Future()))


async def test_a_closing_client_says_what_it_waits_for_also_while_answers_arrive(monkeypatch, caplog):
    monkeypatch.setattr(futures, "FIRST_NOTICE_SECONDS", 0.1)
    unanswered, loop = UnansweredCommands(), asyncio.get_running_loop()
    answers = [Future() for _ in range(30)]
    for number, answer in enumerate(answers):
        unanswered.add(IssuedCommand(f"OptimStep {number}", CommandOrder(), number), answer, loop)
    for number, answer in enumerate(answers):
        loop.call_later(0.02 * number, answer.set_result, None)
    with caplog.at_level(logging.WARNING, "paceline"):
        await unanswered.wait(60)
    [notice] = caplog.messages
    assert notice.startswith("the client is closing: waiting up to 60 s more for ")

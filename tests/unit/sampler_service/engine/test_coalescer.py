"""Delivery of tokens to a reader that may be slow."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from paceline.errors import EngineUnavailable
from paceline.types import ServedModel, StopReason, TopkLogprobs
from sampler_service.engine.coalescer import Coalescer, ReaderGroup
from sampler_service.engine.protocol import Delivery, TokenDelta
from sampler_service.sampling import collect, complete


def delta(index, *tokens, stop=None):
    return TokenDelta(index, list(tokens), [-float(token) for token in tokens], stop)


async def source(*deltas, closed=None):
    try:
        for each in deltas:
            yield each
    finally:
        if closed is not None:
            closed.set()


async def test_a_reader_that_waits_gets_each_token_at_once():
    coalescer = Coalescer()
    reader = aiter(coalescer)
    for token in (1, 2, 3):
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        coalescer.put(delta(0, token))
        assert (await waiting).tokens == [token]


async def test_a_reader_that_is_behind_gets_what_came_meanwhile_in_one_message_per_completion():
    coalescer = Coalescer()
    for token in (1, 2, 3):
        coalescer.put(delta(0, token))
        coalescer.put(delta(1, 10 * token))
    coalescer.put(delta(0, 4, stop=StopReason.STOP))
    coalescer.close()
    first, second = [each async for each in coalescer]
    assert (first.index, first.tokens, first.stop_reason) == (0, [1, 2, 3, 4], StopReason.STOP)
    assert (second.index, second.tokens, second.stop_reason) == (1, [10, 20, 30], None)
    assert second.logprobs == [-10.0, -20.0, -30.0]


async def test_a_reader_that_leaves_more_than_it_may_is_told_of_once_and_what_it_took_does_not_count():
    told = []
    coalescer = Coalescer(delivery=Delivery(max_unread=4, overflowed=lambda: told.append("overflowed")))
    reader = aiter(coalescer)
    for _ in range(3):
        coalescer.put(delta(0, 1, 2))
        coalescer.put(delta(1, 3, 4))
        assert len((await anext(reader)).tokens) + len((await anext(reader)).tokens) == 4
    assert not told
    for _ in range(3):
        coalescer.put(delta(0, 1, 2, 3))
    assert told == ["overflowed"]


async def test_the_engine_has_done_with_a_request_before_its_reader_has():
    told = []
    coalescer = Coalescer(delivery=Delivery(ended=lambda: told.append("ended")))
    coalescer.put(delta(0, 1, stop=StopReason.LENGTH))
    assert not told
    coalescer.close()
    coalescer.close(EngineUnavailable("later"))
    assert told == ["ended"]
    assert [each.tokens async for each in coalescer] == [[1]]


async def behind(readers=None):
    """Return a coalescer whose reader was woken but had to wait for a busy event loop, and the reader's next read."""
    coalescer = Coalescer(readers)
    coalescer.put(delta(0, 1))
    reader = aiter(coalescer)
    time.sleep(0.005)  # noqa: ASYNC251 - that is the point
    assert (await anext(reader)).tokens == [1]
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    return coalescer, waiting


async def test_after_a_reader_had_to_wait_the_next_tokens_share_a_message():
    coalescer, waiting = await behind()
    for token in (2, 3, 4):
        coalescer.put(delta(0, token))
        await asyncio.sleep(0)
    assert not waiting.done()
    assert (await waiting).tokens == [2, 3, 4]


async def test_the_end_of_a_completion_is_not_held_back():
    coalescer, waiting = await behind()
    coalescer.put(delta(0, 2))
    coalescer.put(delta(0, 3, stop=StopReason.STOP))
    await asyncio.sleep(0)
    assert waiting.done()
    assert (await waiting).tokens == [2, 3]


async def test_while_one_reader_had_to_wait_others_leave_their_next_tokens_too_but_not_their_first_ones():
    readers = ReaderGroup()
    other = Coalescer(readers)
    await behind(readers)
    for expected in (True, False):
        reading = asyncio.ensure_future(anext(other))
        await asyncio.sleep(0)
        other.put(delta(0, 1))
        await asyncio.sleep(0)
        assert reading.done() is expected
    other.put(delta(0, 2))
    assert (await reading).tokens == [1, 2]


async def test_a_reader_that_is_not_eager_gets_what_comes_in_some_time_at_once_and_the_end_when_it_comes():
    coalescer = Coalescer(delivery=Delivery(eager=False))
    reading = asyncio.ensure_future(anext(coalescer))
    for token in (1, 2):
        coalescer.put(delta(0, token))
        await asyncio.sleep(0)
    assert not reading.done()
    assert (await reading).tokens == [1, 2]
    coalescer.put(delta(0, 3, stop=StopReason.LENGTH))
    assert (await anext(coalescer)).tokens == [3]


async def test_merging_keeps_every_row_of_likeliest_tokens():
    coalescer = Coalescer()
    for token in (1, 2):
        part = delta(0, token)
        part.topk_logprobs = TopkLogprobs(np.array([[token, 9]], np.int32), np.array([[-1.0, -2.0]], np.float32))
        coalescer.put(part)
    assert (await anext(coalescer)).topk_logprobs.token_ids.tolist() == [[1, 9], [2, 9]]


async def test_of_two_endings_the_first_counts():
    coalescer = Coalescer()
    coalescer.close(EngineUnavailable("died"))
    coalescer.close()
    with pytest.raises(EngineUnavailable):
        await anext(coalescer)


async def test_completions_take_turns():
    coalescer = Coalescer()
    reader = aiter(coalescer)
    coalescer.put(delta(0, 1))
    coalescer.put(delta(1, 2))
    indices = []
    for token in range(3, 7):
        indices.append((await anext(reader)).index)
        coalescer.put(delta(0, token))
        coalescer.put(delta(1, token))
    assert indices == [0, 1, 0, 1]


async def test_an_error_comes_after_the_tokens_before_it():
    coalescer = Coalescer()
    coalescer.put(delta(0, 1))
    coalescer.close(EngineUnavailable("died"))
    reader = aiter(coalescer)
    assert (await anext(reader)).tokens == [1]
    with pytest.raises(EngineUnavailable):
        await anext(reader)


async def test_completions_that_the_engine_left_open_are_aborted_and_not_at_their_limit():
    seen = []
    deltas = complete(source(delta(0, 1, 2, stop=StopReason.STOP), delta(1, 3)), 3, seen.append)
    result = await collect(deltas, 3, ServedModel("tiny"), prompt_logprobs=False)
    assert [sequence.stop_reason for sequence in result.sequences] == [
        StopReason.STOP,
        StopReason.ABORTED,
        StopReason.ABORTED,
    ]
    assert [sequence.tokens.tolist() for sequence in result.sequences] == [[1, 2], [3], []]
    assert [delta.tokens for delta in seen] == [[1, 2], [3]]


@pytest.mark.parametrize("reason", StopReason)
async def test_a_stop_reason_is_passed_on_as_it_is(reason):
    result = await collect(complete(source(delta(0, 1, stop=reason)), 1, id), 1, ServedModel(""), prompt_logprobs=False)
    assert result.sequences[0].stop_reason is reason


async def test_leaving_early_closes_the_engines_iterator():
    closed = asyncio.Event()
    deltas = complete(source(delta(0, 1), delta(0, 2), closed=closed), 1, id)
    await anext(deltas)
    assert not closed.is_set()
    await deltas.aclose()
    assert closed.is_set()


async def test_collecting_joins_what_belongs_together():
    def topk(*rows):
        return TopkLogprobs(np.array(rows, np.int32), np.array(rows, np.float32))

    first, second = delta(0, 1), delta(0, 2, 3, stop=StopReason.LENGTH)
    first.topk_logprobs, second.topk_logprobs = topk([1, 2]), topk([3, 4], [5, 6])
    first.prompt_logprobs, first.prompt_cache_hit_tokens = np.array([np.nan, -1], np.float32), 16
    result = await collect(source(first, second), 1, ServedModel("tiny"), prompt_logprobs=True)
    (sequence,) = result.sequences
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert sequence.topk_logprobs.token_ids.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert result.prompt_logprobs[1] == -1
    assert result.prompt_cache_hit_tokens == 16

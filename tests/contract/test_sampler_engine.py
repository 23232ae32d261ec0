"""The contract of every sampler engine: tokens, log-probabilities, stopping. Checked against plain transformers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import pairwise

import numpy as np
import pytest
from support.models.formulas import log_softmax
from support.models.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer
from support.stacks.sampler_contract import CONTEXT, PROMPT, ask, complete, deltas_of, filtered, one

from paceline.errors import InvalidArgument, OutOfRange, SequenceTooLong, TokenOutOfRange, VersionNotFound
from paceline.types import StopReason

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_describes_the_base_model(engine):
    info = engine.describe()
    assert (info.name, info.max_context_length, info.vocab_size) == ("tiny", CONTEXT, VOCAB_SIZE)
    assert (info.dtype, info.max_lora_rank, info.num_layers) == ("float32", 8, 2)
    await engine.check_health()


async def test_temperature_0_takes_the_likeliest_token_every_time(engine, reference):
    request = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    first, second = await one(engine, ask(**request)), await one(engine, ask(**request))
    likeliest = reference.logits(PROMPT + first.tokens).argmax(-1)[len(PROMPT) - 1 : -1]
    assert first.tokens == second.tokens == likeliest.tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 1.5},
        {"temperature": 1.3, "top_k": 6},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine, reference, params):
    request = ask(**params, max_tokens=12, seed=3, ignore_eos=True, num_samples=2)
    for completion in await complete(engine, request):
        rows = reference.logits(PROMPT + completion.tokens)[len(PROMPT) - 1 : -1]
        expected = [filtered(row, request.params)[token] for row, token in zip(rows, completion.tokens, strict=True)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_sampling_follows_the_distribution(engine, reference):
    request = ask(temperature=1.2, top_k=4, max_tokens=1, seed=11, num_samples=400, ignore_eos=True)
    drawn = [completion.tokens[0] for completion in await complete(engine, request)]
    expected = np.exp(filtered(reference.logits(PROMPT)[-1], request.params))
    frequencies = np.bincount(drawn, minlength=VOCAB_SIZE) / len(drawn)
    assert np.abs(frequencies - expected).max() < 0.1


async def test_a_seed_gives_the_same_samples_again_and_the_next_seed_shares_none_of_them(engine):
    request = {"max_tokens": 10, "seed": 41, "num_samples": 3, "temperature": 1.5, "ignore_eos": True}
    first = [completion.tokens for completion in await complete(engine, ask(**request))]
    again = [completion.tokens for completion in await complete(engine, ask(**request | {"num_samples": 4}))]
    others = [completion.tokens for completion in await complete(engine, ask(**request | {"seed": 42}))]
    assert first == again[:3]
    assert len(set(map(tuple, first + others))) == 6


async def test_samples_without_a_seed_differ(engine):
    request = ask(max_tokens=10, num_samples=4, temperature=1.5, ignore_eos=True)
    assert len({tuple(completion.tokens) for completion in await complete(engine, request)}) == 4


async def test_a_stop_token_ends_a_completion_and_stays_in_it(engine):
    free = await one(engine, ask(max_tokens=12, seed=5, ignore_eos=True))
    stop = free.tokens[6]
    cut = await one(engine, ask(max_tokens=12, seed=5, ignore_eos=True, stop_token_ids=[stop]))
    assert cut.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert len(cut.logprobs) == len(cut.tokens)
    assert (cut.stop_reason, free.stop_reason) == (StopReason.STOP, StopReason.LENGTH)


async def test_a_stop_string_ends_a_completion_and_its_tokens_stay(engine):
    request = {"max_tokens": 80, "seed": 5, "ignore_eos": True}
    free = await one(engine, ask(**request))
    texts = [make_tokenizer().decode([token]) for token in free.tokens]
    stop = next(a + b for a, b in pairwise(texts[8:]) if (a + b).isascii())
    end = next(i for i in range(6, 80) if texts[i - 1] + texts[i] == stop)
    cut = await one(engine, ask(**request, stop=["never", stop], min_tokens=6))
    assert cut.tokens == free.tokens[: end + 1]
    assert cut.stop_reason is StopReason.STOP


async def test_the_end_of_sequence_token_stops_unless_ignored(engine):
    request = {"max_tokens": 60, "seed": 2, "temperature": 2.0, "num_samples": 16}
    ended = [c for c in await complete(engine, ask(**request)) if c.stop_reason is StopReason.STOP]
    assert ended
    assert all(completion.tokens.index(EOS_ID) == len(completion.tokens) - 1 for completion in ended)
    assert all(len(completion.tokens) == 60 for completion in await complete(engine, ask(**request, ignore_eos=True)))


async def test_min_tokens_holds_stop_tokens_back(engine):
    free = await one(engine, ask(max_tokens=12, seed=5, ignore_eos=True))
    bounded = await one(engine, ask(max_tokens=12, seed=5, ignore_eos=True, stop_token_ids=free.tokens, min_tokens=6))
    assert not set(free.tokens) & set(bounded.tokens[:6])


async def test_without_max_tokens_a_completion_goes_to_the_end_of_the_context(engine):
    completion = await one(engine, ask(seed=1, ignore_eos=True))
    assert len(PROMPT) + len(completion.tokens) == CONTEXT
    assert completion.stop_reason is StopReason.LENGTH


async def test_topk_logprobs_list_the_likeliest_tokens_that_the_filters_left(engine, reference):
    request = ask(max_tokens=5, temperature=0.8, top_k=3, seed=9, topk_logprobs=5, ignore_eos=True)
    completion = await one(engine, request)
    rows = reference.logits(PROMPT + completion.tokens)[len(PROMPT) - 1 : -1]
    assert len(completion.topk_ids) == 5
    for ids, values, row in zip(completion.topk_ids, completion.topk_logprobs, rows, strict=True):
        expected = filtered(row, request.params)
        assert ids.tolist() == [*np.argsort(-expected)[:3], -1, -1]
        np.testing.assert_allclose(values[:3], np.sort(expected)[::-1][:3], atol=1e-4)
        assert np.isnan(values[3:]).all()


async def test_prompt_logprobs_come_once_at_temperature_1(engine, reference):
    request = ask(max_tokens=3, temperature=0.5, prompt_logprobs=True, topk_prompt_logprobs=4, num_samples=2)
    first, *others = await deltas_of(engine, request)
    assert all(delta.prompt_logprobs is None for delta in others)
    assert np.isnan(first.prompt_logprobs[0])
    assert first.prompt_logprobs.dtype == np.float32
    np.testing.assert_allclose(first.prompt_logprobs[1:], reference.logprobs(PROMPT), atol=1e-4)
    topk = first.topk_prompt_logprobs
    assert topk.token_ids.shape == topk.logprobs.shape == (len(PROMPT), 4)
    assert (topk.token_ids[0] == -1).all()
    expected = log_softmax(reference.logits(PROMPT))[:-1]
    assert (topk.token_ids[1:] == np.argsort(-expected)[:, :4]).all()
    np.testing.assert_allclose(topk.logprobs[1:], -np.sort(-expected)[:, :4], atol=1e-4)


async def test_compute_logprobs_takes_a_sequence_as_long_as_the_context_also_when_it_is_cached(engine, reference):
    tokens = [(7 * i * i + i) % 256 for i in range(CONTEXT)]
    for _ in range(2):
        logprobs = await engine.compute_logprobs(tokens, None, "")
        assert np.isnan(logprobs[0])
        assert (logprobs.shape, logprobs.dtype) == ((CONTEXT,), np.float32)
        np.testing.assert_allclose(logprobs[1:], reference.logprobs(tokens), atol=1e-4)


async def test_closing_early_frees_the_request(engine):
    async with aclosing(engine.generate(ask(num_samples=3, ignore_eos=True))) as deltas:
        await anext(deltas)
        assert engine.num_running() == 3
    assert engine.num_running() == 0
    assert (await one(engine, ask(max_tokens=2, ignore_eos=True))).stop_reason is StopReason.LENGTH


async def test_cancelling_the_reader_frees_the_request(engine):
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate(ask(num_samples=2, ignore_eos=True)):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_running() == 0


async def test_a_tenant_does_not_hit_the_cache_entries_of_another(engine):
    prompt = [(3 * i) % 256 for i in range(70)]

    async def hits(tenant: str) -> int:
        first, *_ = await deltas_of(engine, ask(prompt, max_tokens=1, tenant=tenant))
        return first.prompt_cache_hit_tokens

    assert await hits("one") == 0
    assert await hits("two") == 0
    assert (await hits("one") > 0) == (engine.name == "vllm")


async def test_bad_requests_are_refused_and_harm_nothing(engine, make_adapter):
    absent = make_adapter()
    for error, request in [
        (TokenOutOfRange, ask([1, VOCAB_SIZE])),
        (TokenOutOfRange, ask([-1])),
        (SequenceTooLong, ask([1] * CONTEXT)),
        (OutOfRange, ask(max_tokens=4, min_tokens=5)),
        (InvalidArgument, ask([])),
        (VersionNotFound, ask(adapter=absent)),
    ]:
        with pytest.raises(error):
            await deltas_of(engine, request)
    with pytest.raises(SequenceTooLong):
        await engine.compute_logprobs([1] * (CONTEXT + 1), None, "")
    with pytest.raises(VersionNotFound):
        await engine.compute_logprobs(PROMPT, absent, "")
    assert engine.num_running() == 0
    assert len((await one(engine, ask(max_tokens=2, ignore_eos=True))).tokens) == 2

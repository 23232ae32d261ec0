"""Where completions end, continue and start: stop strings, continuations, many samples, readers that leave."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.models.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer
from support.stacks.sampler_contract import PROMPT, ask, cache_is_free, complete, one

from paceline.types import StopReason

pytestmark = pytest.mark.asyncio(loop_scope="session")


def texts_of(tokens: list[int]) -> list[str]:
    return [make_tokenizer().decode([token]) for token in tokens]


def ascii_run(texts: list[str], start: int) -> str:
    """Return the first three consecutive ASCII characters from `start` on: a stop string over three tokens."""
    runs = ("".join(texts[i : i + 3]) for i in range(start, len(texts) - 2))
    return next(run for run in runs if run.isascii() and len(run) == 3)


async def test_of_several_stop_strings_the_first_one_to_appear_ends_a_completion_and_nothing_follows(engine):
    request = {"max_tokens": 100, "seed": 5, "ignore_eos": True, "num_samples": 3}
    free = [texts_of(completion.tokens) for completion in await complete(engine, ask(**request))]
    stops = ["never", *(ascii_run(texts, 12 * i) for i, texts in enumerate(free))]
    for completion, texts in zip(await complete(engine, ask(**request, stop=stops)), free, strict=True):
        end = next(i for i in range(100) if any(stop in "".join(texts[: i + 1]) for stop in stops))
        assert texts_of(completion.tokens) == texts[: end + 1]
        assert len(completion.logprobs) == len(completion.tokens)
        assert completion.stop_reason is StopReason.STOP


async def test_prompt_and_sampled_tokens_go_on_as_the_completion_did(engine, make_adapter):
    adapter = make_adapter()
    await engine.add_adapter(adapter)
    for weights in (None, adapter):
        request = {"temperature": 0.0, "ignore_eos": True, "adapter": weights}
        whole = await one(engine, ask(max_tokens=20, **request))
        for cut in (1, 9):
            rest = await one(engine, ask(PROMPT + whole.tokens[:cut], max_tokens=20 - cut, **request))
            assert rest.tokens == whole.tokens[cut:]
            np.testing.assert_allclose(rest.logprobs, whole.logprobs[cut:], atol=1e-5)
    await engine.remove_adapter(adapter)


async def test_256_samples_of_one_call_each_follow_their_own_seed(engine):
    request = {"max_tokens": 8, "temperature": 1.5, "seed": 70, "ignore_eos": True}
    completions = await complete(engine, ask(**request, num_samples=256))
    assert {(len(completion.tokens), completion.stop_reason) for completion in completions} == {(8, StopReason.LENGTH)}
    assert len({tuple(completion.tokens) for completion in completions}) == 256
    fewer = await complete(engine, ask(**request, num_samples=101))
    assert [completion.tokens for completion in fewer] == [completion.tokens for completion in completions[:101]]
    assert engine.num_running() == 0


async def test_with_min_tokens_1_the_first_token_cannot_end_the_completion(engine):
    request = {"max_tokens": 2, "temperature": 2.0, "seed": 8, "topk_logprobs": VOCAB_SIZE}
    free = await one(engine, ask(**request))
    bounded = await one(engine, ask(**request, min_tokens=1))
    assert EOS_ID in free.topk_ids[0]
    assert EOS_ID not in bounded.topk_ids[0]
    assert EOS_ID in bounded.topk_ids[1]


@pytest.mark.parametrize("how", ["close", "cancel", "deadline"])
async def test_a_reader_that_leaves_frees_the_cache_before_the_scheduler_s_next_step(engine, how):
    begun, leave = asyncio.Event(), asyncio.Event()

    async def read(limit: asyncio.Timeout) -> None:
        async with limit:
            deltas = engine.generate(ask(num_samples=64, ignore_eos=True))
            try:
                async for _ in deltas:
                    begun.set()
                    if leave.is_set():
                        return
            finally:
                await deltas.aclose()

    limit = asyncio.timeout(None)
    reader = asyncio.create_task(read(limit))
    await begun.wait()
    assert engine.num_running() > 1
    assert not await cache_is_free(engine)
    if how == "close":
        leave.set()
    elif how == "cancel":
        reader.cancel()
    else:
        limit.reschedule(0)
    await asyncio.gather(reader, return_exceptions=True)
    assert engine.num_running() == 0
    assert await cache_is_free(engine)

"""Stop strings are found in the text of tokens, also after bytes that are no text."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from sampler_service.engine.decoding import stream_after
from sampler_service.engine.hf.batch import StopStrings

WORDS = ["▁", "▁the", "▁end", "b", "é"]


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer with the decoder of Llama 2, in which tokens of single bytes stand for all other text."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


@pytest.mark.parametrize("part", [[0xE2, 0x82], [0xE2], [0xEF, 0xBF, 0xBD]])
@pytest.mark.parametrize("skips", [False, True])
def test_a_prompt_that_ends_within_a_character_is_no_text_of_the_completion(tokenizer, part, skips):
    the, end, b = (256 + WORDS.index(word) for word in ("▁the", "▁end", "b"))
    prompt = [the, end, *[the] * 20, *part]
    stream = stream_after(tokenizer, prompt, skip_special_tokens=skips)
    assert [stream.step(tokenizer, b) for _ in range(2)] == [tokenizer.decode(part) + "b", "b"]
    strings = StopStrings(tokenizer, ["end"], stream_after(tokenizer, prompt, skip_special_tokens=skips))
    assert [strings.push(token, counts=True) for token in (b, the, end)] == [False, False, True]


def test_a_character_that_the_prompt_begins_is_the_completions(tokenizer):
    euro = list("€".encode())
    stream = stream_after(tokenizer, [256, *euro[:1]], skip_special_tokens=False)
    assert [stream.step(tokenizer, token) for token in euro[1:]] == [None, "€"]


def test_the_space_after_a_prompt_is_kept(tokenizer):
    the = 256 + WORDS.index("▁the")
    stream = stream_after(tokenizer, [the] * 40, skip_special_tokens=False)
    assert stream.step(tokenizer, the) == " the"


def test_a_prompt_without_text_is_none_of_the_completion(tokenizer):
    stream = stream_after(tokenizer, [256 + WORDS.index("▁end"), *[0xFF] * 40], skip_special_tokens=False)
    assert stream.step(tokenizer, 256 + WORDS.index("b")) == "b"


@pytest.mark.parametrize("prompt", [[], [0xF0, 0x9F]])
def test_a_stop_string_is_found_after_bytes_that_are_no_text(tokenizer, prompt):
    end = 256 + WORDS.index("▁end")
    for seed in range(50):
        random = Random(seed)
        strings = StopStrings(tokenizer, ["end"], DecodeStream(ids=prompt, skip_special_tokens=False))
        tokens = [random.randrange(end) for _ in range(60)]
        found = [strings.push(token, counts=True) for token in (*tokens, end - 1, end)]
        assert found == [False] * 61 + [True]

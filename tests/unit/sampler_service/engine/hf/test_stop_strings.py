"""Stop strings are found in the text of tokens, also after bytes that are no text."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

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


@pytest.mark.parametrize("prompt", [[], [0xF0, 0x9F]])
def test_a_stop_string_is_found_after_bytes_that_are_no_text(tokenizer, prompt):
    end = 256 + WORDS.index("▁end")
    for seed in range(50):
        random = Random(seed)
        strings = StopStrings(tokenizer, ["end"], DecodeStream(ids=prompt, skip_special_tokens=False))
        tokens = [random.randrange(end) for _ in range(60)]
        found = [strings.push(token, counts=True) for token in (*tokens, end - 1, end)]
        assert found == [False] * 61 + [True]

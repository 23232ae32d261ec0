"""The text of a completion, token by token, without its prompt's."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_PART = "\ufffd"
"""What the bytes of a part of a character are decoded as."""
_TAIL = 16
"""Last tokens of a prompt that say how its text ends."""
_LONGEST_PART = 8
"""Most tokens at the end of a prompt that may be a part of a character."""


def stream_after(tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> DecodeStream:
    """Return a stream that decodes what follows a prompt.

    The library's own returns the whole prompt with the first text after one that ends within a character, as a
    completion that was cut off may. Here such a part is decoded with the completion, which may go on with its rest.
    """
    ids = list(prompt)

    def ends_within_a_character(tokens: list[int]) -> bool:
        tail = tokenizer.decode(tokens[-_TAIL:], skip_special_tokens) or tokenizer.decode(tokens, skip_special_tokens)
        return tail.endswith(_PART)

    lengths = range(len(ids), max(len(ids) - _LONGEST_PART, 0) - 1, -1)
    whole = next((n for n in lengths if not ends_within_a_character(ids[:n])), None)
    if whole is None:  # no text
        return DecodeStream(ids=[], skip_special_tokens=skip_special_tokens)
    stream = DecodeStream(ids=ids[:whole], skip_special_tokens=skip_special_tokens)
    for token in ids[whole:]:
        stream.step(tokenizer, token)
    return stream

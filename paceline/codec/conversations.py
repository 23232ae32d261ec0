"""Conversations to render, over as many calls as they take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.errors import PacelineError
from paceline.trainer.v1 import trainer_service_pb2 as pb

_MOST_BYTES, _MOST_CONVERSATIONS = 256 << 10, 4096
"""Of a call; a longer conversation is one by itself."""
_PLACE = re.compile(r"conversations\[(\d+)\]")


def requests_to_render(
    conversations: Sequence[bytes], base_model: str = ""
) -> Iterator[tuple[int, pb.RenderConversationsRequest]]:
    """Yield requests, each with the number of conversations before it."""
    request, first, size = pb.RenderConversationsRequest(base_model=base_model), 0, 0
    for number, conversation in enumerate(conversations):
        if number > first and (size + len(conversation) > _MOST_BYTES or number - first == _MOST_CONVERSATIONS):
            yield first, request
            request, first, size = pb.RenderConversationsRequest(base_model=base_model), number, 0
        request.conversations.append(conversation)
        size += len(conversation)
    yield first, request


@contextmanager
def counted_from(first: int) -> Iterator[None]:
    """Count conversations in errors from the first of all requests."""
    try:
        yield
    except PacelineError as error:
        error.field = _PLACE.sub(lambda found: f"conversations[{first + int(found[1])}]", error.field, count=1)
        raise

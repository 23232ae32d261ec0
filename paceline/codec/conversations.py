"""Render conversations in as many calls as needed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from paceline.errors import PacelineError
from paceline.trainer.v1 import trainer_service_pb2 as pb

_MOST_BYTES, _MOST_CONVERSATIONS = 256 << 10, 4096
"""Limits of one call; a longer conversation gets a call of its own."""
_PLACE = re.compile(r"^conversations\[(\d+)\]")

Call = Callable[[pb.RenderConversationsRequest], Awaitable[pb.RenderConversationsResponse]]


async def render_all(
    call: Call, conversations: Sequence[bytes], base_model: str = ""
) -> AsyncIterator[pb.RenderedConversation]:
    """Yield the rendered conversations in order. Raises the errors of `call`, with indices into `conversations`."""
    done = 0
    while done < len(conversations) or not conversations:
        request = pb.RenderConversationsRequest(base_model=base_model, conversations=_first(conversations, done))
        try:
            reply = await call(request)
        except PacelineError as error:
            error.field = _PLACE.sub(lambda found: f"conversations[{done + int(found[1])}]", error.field)  # noqa: B023
            raise
        for rendered in reply.conversations:
            yield rendered
        done += len(reply.conversations)


def _first(conversations: Sequence[bytes], done: int) -> list[bytes]:
    """Return the conversations for the next call."""
    taken, size = list[bytes](), 0
    for conversation in conversations[done : done + _MOST_CONVERSATIONS]:
        size += len(conversation)
        if taken and size > _MOST_BYTES:
            break
        taken.append(conversation)
    return taken

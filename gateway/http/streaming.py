"""Streamed responses that free what they need when they end, also before their first part was taken."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

EVENTS = "text/event-stream"
"""Media type of server-sent events."""


class StreamedResponse(StreamingResponse):
    """A response that closes its generator, and then what that reads from.

    A generator alone cannot do so: one that is left at a `yield` waits for the garbage collector, and one that has not
    started never runs its `finally`.
    """

    def __init__(self, parts: AsyncGenerator[bytes], resources: AsyncExitStack | None = None, **options: Any) -> None:
        super().__init__(parts, **options)
        self._resources = resources or AsyncExitStack()
        self._resources.push_async_callback(parts.aclose)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)

"""A service behind the gateway: its channel, readiness, and number of calls in flight."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from paceline.log import get_logger
from paceline.rpc.channel import TlsFiles, open_channel

_READY = grpc.ChannelConnectivity.READY
_CONNECTING = {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING}
_log = get_logger(__name__)

UnaryCall = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
ResponseStreamCall = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
StreamCall = grpc.aio.StreamStreamMultiCallable[bytes, bytes]


class Upstream:
    """One service. Messages are forwarded as bytes."""

    def __init__(self, name: str, target: str, tls: TlsFiles | None) -> None:
        """Open the channel in the running event loop. Logs and errors use `name`: trainer or sampler."""
        self.name = name
        self.target = target
        self.channel = open_channel(target, tls)
        self.in_flight = 0
        self.ready = False
        self._up = asyncio.Event()
        self._told: bool | None = None
        """The value of `ready` that was logged last."""
        self.settled = asyncio.Event()
        """Set once the first connection attempt has succeeded or failed."""
        self._unary: dict[str, UnaryCall] = {}
        self._response_stream: dict[str, ResponseStreamCall] = {}
        self._stream: dict[str, StreamCall] = {}
        self._following: asyncio.Task[None] | None = None

    def unary(self, method: str) -> UnaryCall:
        """Return the callable for a method with one request and one response."""
        if method not in self._unary:
            self._unary[method] = self.channel.unary_unary(method)
        return self._unary[method]

    def response_stream(self, method: str) -> ResponseStreamCall:
        """Return the callable for a method with one request and a stream of responses."""
        if method not in self._response_stream:
            self._response_stream[method] = self.channel.unary_stream(method)
        return self._response_stream[method]

    def stream(self, method: str) -> StreamCall:
        """Return the callable for a method of any kind."""
        if method not in self._stream:
            self._stream[method] = self.channel.stream_stream(method)
        return self._stream[method]

    def connect(self) -> None:
        """Connect, and reconnect whenever the connection is lost."""
        self._following = asyncio.create_task(self._follow())

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until the service is reachable, at most `seconds`."""
        if not self.ready:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), seconds)

    async def close(self) -> None:
        """Close the channel."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.channel.close()

    async def _follow(self) -> None:
        while True:
            state = self.channel.get_state(try_to_connect=True)
            self._note(state)
            await self.channel.wait_for_state_change(state)

    def _note(self, state: grpc.ChannelConnectivity) -> None:
        ready = state is _READY
        # A connection that was closed for being idle is reopened at once, so this is not logged.
        if ready is not self._told and state not in _CONNECTING:
            self._told = ready
            log: Any = _log.info if ready else _log.warning
            log("upstream is up" if ready else "upstream is down", upstream=self.name, target=self.target)
        self.ready = ready
        (self._up.set if ready else self._up.clear)()
        if state not in _CONNECTING:
            self.settled.set()

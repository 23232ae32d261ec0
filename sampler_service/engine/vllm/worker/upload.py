"""Brings an adapter's bytes to the device where the slots are.

A GPU copies from memory that may be paged out only through a buffer of the driver's, while the process waits. Here they
go through two pinned buffers, in pieces, on a stream of their own: beside the step that the GPU is computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
"""Bytes of a pinned buffer: enough for the bus, and little to hold for ever."""
_BUFFERS = 2
"""One is filled while the other is sent."""

Wait = Callable[[], object]
Send = Callable[[Tensor, Tensor], Wait]
"""Begins to copy a buffer to its place on the device; returns what waits until that has ended."""


def _at_once() -> None: ...


class Pieces:
    """Copies bytes through buffers, each of which is filled again when what it held has been sent."""

    def __init__(self, buffers: Sequence[Tensor], send: Send) -> None:
        """Take uint8 buffers of one size."""
        self._buffers = buffers
        self._send = send
        self._sent: list[Wait] = [_at_once] * len(buffers)
        """They outlast a call: the last pieces are still on their way when it returns."""

    def copy(self, data: Tensor, into: Tensor) -> None:
        """Begin to copy all of `data` into `into`, both uint8 [N]; returns when the last piece is under way."""
        size = len(self._buffers[0])
        for number, start in enumerate(range(0, len(data), size)):
            which, piece = number % len(self._buffers), data[start : start + size]
            self._sent[which]()
            staged = self._buffers[which][: len(piece)]
            staged.copy_(piece)
            self._sent[which] = self._send(into[start : start + size], staged)


class Uploader:
    """For one worker, in its own thread. Where the slots are in the host's memory the bytes stay where they are."""

    def __init__(self, device: torch.device) -> None:
        """Take the device of the slots."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
            self._pieces = Pieces(buffers, self._send)

    def upload(self, data: Tensor) -> Tensor:
        """Return the bytes, uint8 [N], on the device, for work that is queued on the current stream from here on."""
        if self._stream is None:
            return data.to(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            into = torch.empty(len(data), dtype=torch.uint8, device=self._device)
            self._pieces.copy(data, into)
        current.wait_stream(self._stream)
        # It was allocated on the other stream, which must not give it away while this one reads it.
        into.record_stream(current)
        return into

    def _send(self, into: Tensor, staged: Tensor) -> Wait:
        into.copy_(staged, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(self._stream)
        return sent.synchronize

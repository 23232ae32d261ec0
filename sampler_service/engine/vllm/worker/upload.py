"""Copies an adapter's bytes to the device of the slots.

A GPU copies pageable memory only through a buffer of the driver, while the process waits. Here the bytes go through two
pinned buffers, in pieces, on a separate stream, beside the step that the GPU is computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
"""Size of a pinned buffer: large enough to saturate the bus, and small enough to keep."""
_BUFFERS = 2
"""Number of buffers: one is filled while the other is sent."""

Wait = Callable[[], object]
Send = Callable[[Tensor, Tensor], Wait]
"""Starts to copy a buffer to its place on the device; returns a function that waits for the copy."""


def _at_once() -> None: ...


class Pieces:
    """Copies bytes through buffers, each of which is refilled once its content has been sent."""

    def __init__(self, buffers: Sequence[Tensor], send: Send) -> None:
        """`buffers` are uint8 tensors of the same size."""
        self._buffers = buffers
        self._send = send
        self._sent: list[Wait] = [_at_once] * len(buffers)
        """Waits for each buffer's last copy. They outlast a call, which returns while the last pieces are in flight."""

    def copy(self, data: Tensor, into: Tensor) -> None:
        """Copy `data` into `into`, both uint8 [N]; return when the last piece is in flight."""
        size = len(self._buffers[0])
        for number, start in enumerate(range(0, len(data), size)):
            which, piece = number % len(self._buffers), data[start : start + size]
            self._sent[which]()
            staged = self._buffers[which][: len(piece)]
            staged.copy_(piece)
            self._sent[which] = self._send(into[start : start + size], staged)


class Uploader:
    """Uploads for one worker, in its own thread. If the slots are in host memory, nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        """`device` is that of the slots."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
            self._pieces = Pieces(buffers, self._send)

    def upload(self, data: Tensor) -> Tensor:
        """Return the bytes, uint8 [N], on the device, for work queued on the current stream from now on."""
        if self._stream is None:
            return data.to(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            into = torch.empty(len(data), dtype=torch.uint8, device=self._device)
            self._pieces.copy(data, into)
        current.wait_stream(self._stream)
        # The tensor was allocated on the other stream, which must not reuse its memory while this one reads it.
        into.record_stream(current)
        return into

    def _send(self, into: Tensor, staged: Tensor) -> Wait:
        into.copy_(staged, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(self._stream)
        return sent.synchronize

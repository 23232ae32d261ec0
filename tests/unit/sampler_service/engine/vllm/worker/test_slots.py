"""Bytes for a GPU's slots go through two buffers; on a CPU they are used in place."""

from __future__ import annotations

import pytest
import torch

from sampler_service.engine.vllm.worker.slots import Pieces, Uploader

SIZE = 8


class Bus:
    """Copies only when waited for, as late as a GPU may, so a buffer that was overwritten meanwhile is lost."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.begun = 0
        self.waits = []

    def send(self, into: torch.Tensor, staged: torch.Tensor):
        number, self.begun = self.begun, self.begun + 1
        self.waiting.append(number)

        def wait() -> None:
            if number in self.waiting:
                self.waiting.remove(number)
                into.copy_(staged)

        self.waits.append(wait)
        return wait


@pytest.mark.parametrize("count", [0, 1, SIZE - 1, SIZE, 2 * SIZE, 5 * SIZE + 3])
def test_a_buffer_is_filled_again_only_when_it_was_sent(count):
    bus = Bus()
    pieces = Pieces([torch.empty(SIZE, dtype=torch.uint8) for _ in range(2)], bus.send)
    files = [torch.randint(256, (count,), dtype=torch.uint8) for _ in range(2)]
    places = [torch.zeros_like(file) for file in files]
    for file, place in zip(files, places, strict=True):  # the second starts while the first is in flight
        pieces.copy(file, place)
        assert len(bus.waiting) <= 2
    for wait in bus.waits:
        wait()
    assert all(map(torch.equal, places, files))
    assert bus.begun == 2 * -(-count // SIZE)


def test_on_a_cpu_nothing_is_copied():
    data = torch.arange(100, dtype=torch.uint8)
    assert Uploader(torch.device("cpu")).upload(data).data_ptr() == data.data_ptr()

"""Weights on a GPU are written as the safetensors library writes them, as they were when captured."""

import pytest
import torch
from safetensors.torch import save_file

from trainer_service.engine.runs.async_save import AsyncSave, SaveContent, StagingMemory, TensorFile
from trainer_service.engine.runs.preallocated_file import PreallocatedFile

pytestmark = pytest.mark.gpu

NAME = "adapter_model.safetensors"
MANY = 9_000_000
"""Elements: more than are transferred at once."""


def tensors():
    torch.manual_seed(0)
    shapes = {"a": (3, 5), "b": (MANY,), "c": (64, 1024), "d": (1,), "e": (0, 4), "f": ()}
    made = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    return {**made, "turned": torch.randn(96, 32, device="cuda").t(), "step": torch.tensor(7, device="cuda")}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preallocated", [None, PreallocatedFile()], ids=["copied", "preallocated"])
def test_a_file_holds_the_bytes_of_the_tensors_when_they_were_captured(tmp_path, dtype, preallocated):
    values, memory = tensors(), StagingMemory(1 << 30, pinned=True)
    expected = {
        name: value.to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for name, value in values.items()
    }
    save_file(expected, tmp_path / NAME)
    for number in range(3):  # from the second on, the preallocated file may be used
        directory = tmp_path / str(number)
        directory.mkdir()
        kept = {name: value.clone() for name, value in values.items()}
        save = AsyncSave(SaveContent([TensorFile(NAME, kept, dtype)], {}), memory, preallocated)
        save.secure()
        for value in kept.values():
            value.zero_()
        save.write(directory)
        assert (directory / NAME).read_bytes() == (tmp_path / NAME).read_bytes()

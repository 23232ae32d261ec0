"""Shares GPU memory with another process on the same GPU, by CUDA IPC."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.weight_sharing import CudaStorage, SharedStorage


def share_cuda(tensor: Tensor) -> SharedStorage:
    """Describe the GPU memory of a tensor for another process on the same GPU.

    The values are those that torch.multiprocessing pickles and sends (torch/multiprocessing/reductions.py).
    """
    storage = tensor.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()  # type: ignore[no-untyped-call]
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    cuda = CudaStorage(uuid, handle, offset, counter, counter_offset, event, event_sync)
    return SharedStorage(size, cuda=cuda)

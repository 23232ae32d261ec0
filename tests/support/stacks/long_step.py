"""A worker of vLLM whose steps last as long as a file exists."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from sampler_service.engine.vllm.cpu.lora import GroupedLoraCpuWorker
from support.patience import PATIENCE

HOLD_VARIABLE = "TEST_LONG_STEP_HOLD"
"""Names the file. The worker writes `RUNNING` into it when a step has begun."""
RUNNING = "a step is running"


class LongStepWorker(GroupedLoraCpuWorker):
    """Computes one layer again and again, in each step, until the file is gone."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        layer = self.model_runner.get_model().model.layers[1]
        layer.register_forward_pre_hook(lambda layer, _: _stay_in(layer, Path(os.environ[HOLD_VARIABLE])))


def _stay_in(layer: torch.nn.Module, hold: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            written = hold.read_text()
        except FileNotFoundError:
            return
        if not written:
            hold.write_text(RUNNING)
        layer.self_attn.qkv_proj(torch.zeros(1, 64))
        time.sleep(1e-3)

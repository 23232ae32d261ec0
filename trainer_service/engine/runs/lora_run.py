"""A run that trains an adapter on the shared base model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from paceline.types import LoraConfig
from paceline.weights import read_adapter_config
from trainer_service.engine.runs.adapters import adapter_config
from trainer_service.engine.runs.async_save import SaveContent
from trainer_service.engine.runs.peft_format import check_adapter_config
from trainer_service.engine.runs.reading import check_tensors, read_tensors
from trainer_service.engine.runs.run import EngineRun
from trainer_service.engine.runs.tensor_files import TensorFile


@dataclass(slots=True, kw_only=True)
class LoraRun(EngineRun):
    """A run with an adapter: float32 weights by PEFT's names."""

    lora: LoraConfig
    targets: list[str]
    """target_modules of the adapter."""
    _files: dict[torch.dtype, TensorFile] = field(default_factory=dict, init=False)
    """The file that `export` uses for each dtype; reused because the run's tensors stay the same objects."""

    @property
    def trained(self) -> LoraConfig:
        return self.lora

    @property
    def drops(self) -> bool:
        return self.lora.dropout > 0

    def exact(self, base_model: str) -> SaveContent:
        return self.export(base_model, torch.float32)

    def export(self, base_model: str, dtype: torch.dtype) -> SaveContent:
        """Return an adapter in PEFT's layout."""
        file = self._files.setdefault(dtype, TensorFile(WEIGHTS_FILE, self.parameters, dtype, {"format": "pt"}))
        return SaveContent([file], {CONFIG_FILE: adapter_config(self.lora, self.targets, base_model)})

    def read_weights(self, directory: Path, *, exact: bool) -> dict[str, Tensor]:
        """Without `exact`, accept any floating-point adapter, also PEFT's, of the same modules, rank and scaling."""
        weights = read_tensors(directory / WEIGHTS_FILE)
        check_adapter_config(self.lora, read_adapter_config(directory / CONFIG_FILE).settings)
        dtypes = (torch.float32,) if exact else (torch.float32, torch.bfloat16, torch.float16)
        check_tensors(weights, {name: parameter.shape for name, parameter in self.parameters.items()}, dtypes)
        return weights

"""Makes the engine that was asked for, never another one."""

from __future__ import annotations

from typing import Literal

from sampler_service.engine.base import SamplerEngine
from sampler_service.engine.options import EngineOptions

EngineKind = Literal["vllm", "hf"]


def create_engine(kind: EngineKind, options: EngineOptions) -> SamplerEngine:
    """Make an engine; nothing is loaded before its `start`. Only the module of the engine asked for is imported.

    Raises ImportError when the engine's library is not installed, ValueError on an unknown kind.
    """
    if kind == "vllm":
        from sampler_service.engine.vllm_engine import VllmEngine  # noqa: PLC0415

        return VllmEngine(options)
    if kind == "hf":
        from sampler_service.engine.hf_engine import HfEngine  # noqa: PLC0415

        return HfEngine(options)
    raise ValueError(f"unknown engine {kind!r}; choose vllm or hf")

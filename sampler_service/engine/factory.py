"""Creates the requested engine; there is no fallback to another one."""

from __future__ import annotations

from functools import partial
from typing import Literal

from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import SamplerEngine
from sampler_service.engine.restartable import RebuildingEngine

EngineKind = Literal["vllm", "hf"]


def create_service_engine(kind: EngineKind, bridge: str, serves: str, options: EngineOptions) -> RebuildingEngine:
    """Create a service's engine: a wrapper that survives the death of the engine inside it. Raises as `create_engine`.

    With `in_place` the inner engine's weights can be written. To serve whole models its model is overwritten, which hf
    does not support; with the bridge restart the inner engine is built again for each model instead.
    """
    _check(kind, options)
    if options.in_place != "off" and kind == "vllm":
        from sampler_service.engine.vllm.in_place import InPlaceEngine  # noqa: PLC0415

        return RebuildingEngine(InPlaceEngine, options)
    if bridge == "restart" or serves == "adapters":
        return RebuildingEngine(partial(_make_engine, kind), options)  # checked once, not at every rebuild
    if kind != "vllm":
        raise ValueError(f"engine {kind} changes its model by bridge=restart alone; choose it, or engine=vllm")
    from sampler_service.engine.vllm.replaceable_model import InPlaceVllmEngine  # noqa: PLC0415

    return RebuildingEngine(InPlaceVllmEngine, options)


def _check(kind: EngineKind, options: EngineOptions) -> None:
    """Check vLLM's internals before modules that depend on them are imported."""
    if kind == "vllm":
        from sampler_service.engine.vllm.version_check import check_vllm  # noqa: PLC0415

        check_vllm(options)


def create_engine(kind: EngineKind, options: EngineOptions) -> SamplerEngine:
    """Create an engine; nothing is loaded before its `start`. Only the requested engine's module is imported.

    Raises ImportError if the engine's library is not installed, EngineUnfit if its version is not supported, ValueError
    for an unknown kind, or if hf is asked to lend its base weights.
    """
    _check(kind, options)
    return _make_engine(kind, options)


def _make_engine(kind: EngineKind, options: EngineOptions) -> SamplerEngine:
    if kind == "vllm":
        from sampler_service.engine.vllm.engine import VllmEngine  # noqa: PLC0415

        return VllmEngine(options)
    if kind == "hf":
        if options.base_dir is not None:
            raise ValueError("the engine hf lends no base weights; bridge=shared takes engine=vllm")
        from sampler_service.engine.hf.engine import HfEngine  # noqa: PLC0415

        return HfEngine(options)
    raise ValueError(f"unknown engine {kind!r}; choose vllm or hf")

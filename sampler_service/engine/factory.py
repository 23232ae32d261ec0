"""Makes the engine that was asked for, never another one."""

from __future__ import annotations

from functools import partial
from typing import Literal

from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import SamplerEngine
from sampler_service.engine.restartable import RebuildingEngine

EngineKind = Literal["vllm", "hf"]


def create_service_engine(kind: EngineKind, bridge: str, serves: str, options: EngineOptions) -> RebuildingEngine:
    """Make the engine of a service, which outlives the deaths of the engine that does the work. As `create_engine`.

    With `in_place` that engine's weights can be written. Where whole models are served, its model is overwritten, which
    hf cannot; but for the bridge restart, where the engine is built again for each.
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
    """Look at vLLM's internals before anything else of it is imported."""
    if kind == "vllm":
        from sampler_service.engine.vllm.version_check import check_vllm  # noqa: PLC0415

        check_vllm(options)


def create_engine(kind: EngineKind, options: EngineOptions) -> SamplerEngine:
    """Make an engine; nothing is loaded before its `start`. Only the module of the engine asked for is imported.

    Raises ImportError when the engine's library is not installed, EngineUnfit when it is another one than is known,
    ValueError on an unknown kind, and where hf is told to lend its base weights.
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

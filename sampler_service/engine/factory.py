"""Creates the requested engine; there is no fallback to another one."""

from __future__ import annotations

from functools import partial

from paceline.extras import needing
from sampler_service.engine.options import EngineKind, EngineOptions, Mode, Weights
from sampler_service.engine.protocol import SamplerEngine
from sampler_service.engine.restartable import RestartableEngine


def create_service_engine(mode: Mode, options: EngineOptions) -> RestartableEngine:
    """Create a service's engine: a wrapper that survives the death of the engine inside it. Raises as `create_engine`.

    Each restart creates the engine inside it again, with the checks of `create_engine`.
    """
    return RestartableEngine(partial(create_engine, mode.engine, weights=mode.weights), options)


def create_engine(kind: EngineKind, options: EngineOptions, weights: Weights = Weights.ADAPTERS) -> SamplerEngine:
    """Create an engine; nothing is loaded before its `start`. Only the requested engine's module is imported.

    With `WRITE` it is a WritableEngine, with `OVERWRITE` a ModelEngine. Raises MissingExtra if the engine's library is
    not installed, EngineUnfit if its version is not supported, ValueError for an unknown kind, or if hf is asked to
    lend its base weights or to overwrite its model.
    """
    if kind == "hf":
        if options.base_dir is not None:
            raise ValueError("the engine hf does not lend base weights; bridge=shared takes engine=vllm")
        if weights is Weights.OVERWRITE:
            raise ValueError("the engine hf changes its model with bridge=restart only; set that, or engine=vllm")
        with needing("sampler-hf", "the engine hf"):
            from sampler_service.engine.hf.engine import HfEngine  # noqa: PLC0415

        return HfEngine(options)
    if kind != "vllm":
        raise ValueError(f"unknown engine {kind!r}; choose vllm or hf")
    with needing("sampler", "the engine vllm"):
        from sampler_service.engine.vllm.version_check import check_vllm  # noqa: PLC0415

    check_vllm(options)  # before the modules that depend on vLLM's internals are imported
    from sampler_service.engine.vllm.engine import VllmEngine  # noqa: PLC0415
    from sampler_service.engine.vllm.in_place import ReplaceableVllmEngine, WritableVllmEngine  # noqa: PLC0415

    engines = {Weights.WRITE: WritableVllmEngine, Weights.OVERWRITE: ReplaceableVllmEngine}
    return engines.get(weights, VllmEngine)(options)

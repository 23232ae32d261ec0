"""Answers calls that load an adapter while vLLM computes a step.

vLLM's engine answers calls between two steps, and on a CPU a step takes tens of milliseconds. A worker in the engine's
own thread can look for such a call before each layer, since loading writes a slot that no request of the step uses.
While 8 streams are sampled, a version is active after 66 ms instead of 174, and its first token comes after 377 ms
instead of 505 (`make bench-publish`, two cores of an AMD EPYC).
"""

# ruff: noqa: SLF001 - vLLM handles a call in a private method of its engine

from __future__ import annotations

from queue import Queue
from typing import Any

import torch
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

METHOD = "answer_loads_mid_step"
"""Name of the engine's method that `add_method` adds. A client calls it once the workers have prepared for adapters."""

Call = tuple[EngineCoreRequestType, Any]


def add_method() -> None:
    """Add the method to vLLM's engine, which looks up by name what its clients call."""
    setattr(EngineCoreProc, METHOD, _answer_loads_mid_step)


def _answer_loads_mid_step(core: EngineCoreProc) -> None:
    """Answer calls of `load_adapter` before each layer from now on, if all adapters can be copied into slots."""
    worker = core.model_executor.driver_worker.worker
    if not worker.slot_writer.writes_all_layers:
        return  # vLLM would load some, and evict adapters of the running step for them

    def answer(*_: object) -> None:
        if core.input_queue.queue and (call := _take_load(core.input_queue)) is not None:
            # As between two steps. What goes wrong is the call's answer, and the step goes on.
            with torch.inference_mode(mode=False), torch.no_grad():
                core._handle_client_request(*call)

    for layer in worker.internals.layers.values():
        layer.register_forward_pre_hook(answer)


def _take_load(calls: Queue[Call]) -> Call | None:
    """Take a call that loads an adapter out of the queue; None if there is none, or if another call is before it.

    It may overtake requests, but not a call that unloads an adapter or writes weights.
    """
    with calls.mutex:
        for place, (kind, content) in enumerate(calls.queue):
            if kind is EngineCoreRequestType.UTILITY:
                _, _, method, arguments = content
                if method != "collective_rpc" or arguments[0] != "load_adapter":
                    return None
                del calls.queue[place]
                return kind, content
    return None

"""A KV cache for CPUs whose blocks are cleared before another sequence gets them.

vLLM's CPU attention multiplies the values after a sequence's end in its last block by zero. NaN and infinity, which an
adapter that overflowed leaves there, survive that and would get into the results of the next sequence in this block.
vLLM clears blocks for some kinds of models; this module makes it do so for all.
"""

# ruff: noqa: SLF001 - vLLM calls a private method of its model runner to clear blocks

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from sampler_service.engine.vllm.scheduler import FairAsyncScheduler, FairScheduler, use_scheduler


@dataclass
class ClearedKVCacheConfig(KVCacheConfig):
    """Makes the scheduler list each step's new blocks for the worker to clear."""

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


def _cleared(config: KVCacheConfig) -> ClearedKVCacheConfig:
    return ClearedKVCacheConfig(**{field.name: getattr(config, field.name) for field in fields(config)})


class ClearingScheduler(FairScheduler):
    """The scheduler with this configuration."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, _cleared(kv_cache_config), *args, **kwargs)


class ClearingAsyncScheduler(FairAsyncScheduler):
    """The asynchronous scheduler with this configuration."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, _cleared(kv_cache_config), *args, **kwargs)


def clear_new_blocks(config: Any) -> None:
    """Make an engine of this configuration list its new blocks; call it before the engine is created."""
    use_scheduler(config, ClearingScheduler, ClearingAsyncScheduler)


def clear_on(model_runner: Any) -> None:
    """Make a worker clear the listed blocks in the KV caches of all attention layers."""

    def clear(block_ids: list[int]) -> None:
        layers = model_runner.compilation_config.static_forward_context
        groups = model_runner.kv_cache_config.kv_cache_groups
        names = [
            name for group in groups if isinstance(group.kv_cache_spec, AttentionSpec) for name in group.layer_names
        ]
        caches = [layers[name].kv_cache for name in names if name in layers]
        blocks = torch.tensor(block_ids)
        for cache in {cache.data_ptr(): cache for cache in caches if isinstance(cache, torch.Tensor)}.values():
            cache.index_fill_(0, blocks, 0)

    model_runner._zero_block_ids = clear

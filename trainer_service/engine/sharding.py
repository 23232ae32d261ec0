"""The base model dealt over the ranks by FSDP2: each holds a part of every layer and gathers a layer while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from paceline.errors import Unsupported
from trainer_service.engine.base_model import backbone
from trainer_service.engine.forward import PackLogprobs
from trainer_service.engine.packing import Pack, one_token_pack
from trainer_service.engine.ranks import Ranks


class Passes:
    """Runs forward passes, with or without backward, on all ranks at the same time. One rank alone just runs them."""

    def __init__(self, forward: PackLogprobs, ranks: Ranks, device: torch.device) -> None:
        """Deal the frozen weights of `forward` over the ranks, onto `device`; all ranks do this together.

        Raises Unsupported for models without a list of layers, and for a torch that cannot recover a failed pass.
        """
        self._ranks, self._forward = ranks, forward
        self._gathers = _Gathers()
        self._root = _shard(forward, self._gathers, ranks.size, device) if ranks.size > 1 else None
        self._idle_pack = one_token_pack(device)
        if ranks.size > 1:
            # Notes the collectives of each kind of pass, before any can fail.
            for with_gradient in (True, False):
                self.run(None, lambda _: None, with_gradient=with_gradient)

    def run(self, pack: Pack | None, work: Callable[[Pack], None], *, with_gradient: bool) -> None:
        """Do `work` on this rank's pack, which passes it once through the model; raise what any rank raised.

        A rank without a pack passes a single token through, for the collectives alone.
        """
        if self._root is None:
            if pack is not None:
                work(pack)
            return
        self._gathers.begin(with_gradient=with_gradient)
        try:
            self._ranks.together(lambda: self._idle(with_gradient) if pack is None else work(pack), self._catch_up)
        finally:
            # After a pass without backward the weights outside the layers are still whole.
            self._root.reset_iter_state()

    def _idle(self, with_gradient: bool) -> None:
        with torch.set_grad_enabled(with_gradient):
            logprobs = self._forward(self._idle_pack)
        if with_gradient:
            torch.autograd.backward((logprobs * 0.0).sum())

    def _catch_up(self) -> None:
        if self._root is not None:
            self._root.reset_iter_state()
            self._gathers.complete()


class _Gathers:
    """Gathers weights for FSDP2, whose `AllGather` this is, and knows what a pass gathers.

    That is the same for all passes of a kind, as every pass runs through all layers, and backward through them all too.
    """

    def __init__(self) -> None:
        self._plans: dict[bool, list[tuple[int, torch.dtype, torch.device]]] = {}
        self._plan: list[tuple[int, torch.dtype, torch.device]] = []
        self._done = 0
        self._noting = False

    def begin(self, *, with_gradient: bool) -> None:
        """Begin a pass; the first of its kind is noted."""
        self._noting = with_gradient not in self._plans
        self._plan = self._plans.setdefault(with_gradient, [])
        self._done = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._noting:
            self._plan.append((input_tensor.numel(), input_tensor.dtype, input_tensor.device))
        self._done += 1
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)  # type: ignore[no-any-return]

    def complete(self) -> None:
        """Take part in what is left of the pass, with zeros; its results are given up on every rank."""
        for count, dtype, device in self._plan[self._done :]:
            zeros = torch.zeros(count, dtype=dtype, device=device)
            dist.all_gather_single(torch.empty(count * dist.get_world_size(), dtype=dtype, device=device), zeros)
        self._done = len(self._plan)


def _shard(forward: PackLogprobs, gathers: _Gathers, size: int, device: torch.device) -> FSDPModule:
    """Shard each layer by itself, and what is outside the layers together with the head, which may share weights."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise Unsupported("several ranks need a torch whose FSDPModule has reset_iter_state.", field="ranks")
    mesh = init_device_mesh(device.type, (size,))
    parts: list[nn.Module] = [*_decoder_layers(forward.model), forward]
    for part in parts:
        sharded = fully_shard(part, mesh=mesh)
        sharded.set_custom_all_gather(gathers)  # type: ignore[arg-type]
    # Every layer then takes part in every backward pass, whichever of them a run has adapters in.
    forward.model.get_input_embeddings().register_forward_hook(_require_gradient)
    return sharded


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.num_hidden_layers
    for module in backbone(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise Unsupported(f"{type(model).__name__} has no list of {count} layers to deal over ranks.", field="ranks")


def _require_gradient(_module: nn.Module, _inputs: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden

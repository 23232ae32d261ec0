"""The base model sharded over the ranks by FSDP2: each holds a part of every layer and gathers a layer to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from paceline.errors import OutOfMemory, PacelineError, Unsupported
from trainer_service.engine.distributed.ranks import Ranks, convert_memory_errors, in_step
from trainer_service.engine.model.base_model import FASTEST, PassMode, decoder_layers, hidden_states
from trainer_service.engine.model.diagnosis import why_failed

T = TypeVar("T")


class ShardedModel:
    """A frozen base model on one rank, or sharded over several ranks that run their passes at the same time."""

    def __init__(self, load: Callable[[], PreTrainedModel], ranks: Ranks, device: torch.device) -> None:
        """Load the model and shard its weights over `ranks`, onto `device`; all ranks call this together.

        With several ranks, raises Unsupported for models without a list of layers, and for a torch that cannot recover
        from a failed pass.
        """
        self._ranks, self._device = ranks, device
        self._gathers = Gathers()
        self._root: Any = None
        self._mode = FASTEST
        self.layer_inputs: list[Tensor] = []
        """Input of the layers in this pass, if every backward pass must reach it."""
        self.names_modules = False
        """Whether errors of a pass on several ranks name the module that raised them: others see only the message."""
        if ranks.size == 1:
            self.model = load()
            return
        mesh = init_device_mesh(device.type, (ranks.size,))
        # In turn, so that host memory holds one whole copy and not one for each rank.
        self.model = ranks.in_turn(lambda: self._shard(load(), mesh))

    def rehearse(self, mode: PassMode) -> None:
        """Record the collectives of each kind of pass in a mode, before any can fail; all ranks call this together."""
        self._mode = mode
        self._gathers.forget()
        for with_gradient in (True, False):
            self.run(None, with_gradient=with_gradient)

    def run(self, work: Callable[[], T] | None, *, with_gradient: bool) -> T | None:
        """Run `work`, a forward pass, also backward `with_gradient`; raise on all ranks what any of them raised.

        A rank whose `work` is None runs a single token through the model to take part in the collectives.
        """
        if self._root is None:
            return work() if work is not None else None
        own: Callable[[], T | None] = work or (lambda: self._idle(with_gradient))
        self._gathers.begin(with_gradient=with_gradient)
        try:
            return self._ranks.together(lambda: self._named(own), self._catch_up)
        finally:
            self.layer_inputs.clear()
            # After a pass without backward the weights outside the layers are still gathered.
            self._root.reset_iter_state()

    def run_root(self, compute: Callable[[], T]) -> T:
        """Run the forward part of a pass, with the output head; return the tensors that its backward part starts from.

        The weights outside the layers are gathered only from this call until the pass ends.
        """
        return compute() if self._root is None else self._root(compute)

    def _named(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OutOfMemory:
            raise  # The machine's fault, not a module's.
        except Exception as error:
            if not self.names_modules:
                raise
            metadata = error.metadata if isinstance(error, PacelineError) else {}
            raise Unsupported(f"{why_failed(error, self.model)}.", metadata=metadata) from error

    def _shard(self, model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
        """Shard each layer by itself, and everything else, with the head, as one: weights there may be tied."""
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise Unsupported("several ranks need a torch whose FSDPModule has reset_iter_state.", field="ranks")
        layers = decoder_layers(model)
        if not layers:
            raise Unsupported(f"{type(model).__name__} has no list of layers to shard over ranks.", field="ranks")
        for part in (*layers, _Root(model)):
            self._root = fully_shard(part, mesh=mesh)
            self._root.set_custom_all_gather(self._gathers)
        model.get_input_embeddings().register_forward_hook(self._enter)
        return model

    def _enter(self, _embedding: nn.Module, _tokens: Any, hidden: Tensor) -> Tensor:
        # Makes every layer take part in every backward pass, whichever of them a run has adapters in.
        if torch.is_grad_enabled():
            self.layer_inputs.append(hidden.requires_grad_())
        return hidden

    def _idle(self, with_gradient: bool) -> None:
        with convert_memory_errors():
            with torch.set_grad_enabled(with_gradient):
                total = self.run_root(self._pass_token)
            if with_gradient:
                torch.autograd.grad(total, self.layer_inputs)

    def _pass_token(self) -> Tensor:
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        return hidden_states(self.model, self._mode, token, token, (1,)).sum()

    def _catch_up(self) -> None:
        self._root.reset_iter_state()
        self._gathers.complete()


class _Root(nn.Module):
    """The module that FSDP2 wraps as the model's root: its forward pass runs any computation with the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class Gathers:
    """Implements FSDP2's `AllGather` and records what a pass gathers.

    All passes of a kind gather the same, because each runs through all layers, forward and backward.
    """

    def __init__(self) -> None:
        self._plans: dict[bool, list[tuple[int, torch.dtype, torch.device]]] = {}
        self._plan: list[tuple[int, torch.dtype, torch.device]] = []
        self._group: dist.ProcessGroup | None = None
        self._done = 0
        self._recording = False

    def forget(self) -> None:
        """Discard the records of what passes gather."""
        self._plans.clear()

    def begin(self, *, with_gradient: bool) -> None:
        """Start a pass; record it if it is the first of its kind."""
        self._recording = with_gradient not in self._plans
        self._plan = self._plans.setdefault(with_gradient, [])
        self._done = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the tensor that weights are gathered into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._group = group
        if self._recording:
            self._plan.append((input_tensor.numel(), input_tensor.dtype, input_tensor.device))
        if output_tensor.device.type == "cpu":
            # gloo counts a collective before it allocates copies of both tensors. If that failed, the collective could
            # not be completed later: it would pair with the others' next one. So check that both fit into memory first.
            copies = [torch.empty_like(tensor) for tensor in (output_tensor, input_tensor)]
            del copies
        with in_step():
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        self._done += 1
        return work

    def complete(self) -> None:
        """Take part in the pass's remaining collectives, with zeros; every rank discards the results.

        Raises OutOfStepError.
        """
        for count, dtype, device in self._plan[self._done :]:
            with in_step():
                zeros = torch.zeros(count, dtype=dtype, device=device)
                whole = torch.empty(count * dist.get_world_size(self._group), dtype=dtype, device=device)
                dist.all_gather_single(whole, zeros, group=self._group)
        self._done = len(self._plan)

"""Base class of the engine's runs: the gradient that accumulates, the step that applies it, state saved and loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.types import OptimizerParams, RunParameters
from trainer_service.engine.optimizers.base import AnyOptimizer
from trainer_service.engine.optimizers.make import make_optimizer
from trainer_service.engine.runs.async_save import AsyncSave, SaveContent, StagingMemory
from trainer_service.engine.runs.preallocated_file import PreallocatedFile

GRADIENT_BYTES = 4
"""Bytes of each trained parameter's gradient, in float32."""
TRAINED_BYTES = GRADIENT_BYTES + 8
"""Bytes of each trained parameter's gradient and AdamW moments, without the weight itself."""


@dataclass(slots=True, kw_only=True)
class EngineRun(ABC):
    """A run's weights, optimizer and counters, whatever the run trains."""

    run_id: str
    trained: RunParameters
    """What the run trains, as set when it was created."""
    parameters: dict[str, nn.Parameter]
    """Parameters that get gradients, by the names of the weights on disk. The gradients are float32."""
    rng_state: Tensor
    """uint8; state of the generator for everything random in the run."""
    optimizer: AnyOptimizer | None = None
    """Created by the first step; None before it."""
    step: int = 0
    """Optimizer steps taken."""
    has_gradient: bool = False
    """Whether a gradient, even a zero one, waits for the optimizer."""
    pending_tokens: int = 0
    """Tokens whose loss went into the waiting gradient."""
    saves: list[AsyncSave] = field(default_factory=list)
    """Saves captured since the run last changed."""
    released_moments: int | None = None
    """Bytes of the optimizer's state, if `release` freed it."""
    uses_dropout: bool = False
    """Whether training uses dropout."""

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """The run's exact weights; not a copy."""
        return self.parameters

    @abstractmethod
    def exact(self) -> SaveContent:
        """Return files of `weights` from which `read_weights` reads the same bits."""

    @abstractmethod
    def export(self, dtype: torch.dtype) -> SaveContent:
        """Return files of the weights, rounded to `dtype`, for other tools. The same weights give the same bytes."""

    @abstractmethod
    def read_weights(self, directory: Path, *, exact: bool) -> dict[str, Tensor]:
        """Read weights that fit the run; with `exact`, accept only files of the method `exact`.

        Raises CheckpointMismatch or ChecksumMismatch.
        """

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights with those that `read_weights` returned."""
        self.before_change()
        for name, own in self.weights.items():
            own.copy_(weights[name])

    @property
    def owned(self) -> list[nn.Parameter]:
        """Every tensor that exists for the run's whole life."""
        return list(self.parameters.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the run's weights, gradient and optimizer state in memory."""
        tensors = [*self.owned, *(parameter.grad for parameter in self.parameters.values())]
        tensors += self.optimizer.tensors.values() if self.optimizer is not None else []
        storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the run may come to hold between commands; before the first step, AdamW's moments are assumed."""
        count = sum(parameter.numel() for parameter in self.parameters.values())
        moments = TRAINED_BYTES - GRADIENT_BYTES
        if self.optimizer is not None:
            optimizer = _bytes(self.optimizer.tensors.values())
        else:
            optimizer = moments * count if self.released_moments is None else self.released_moments
        return _bytes(self.owned) + GRADIENT_BYTES * count + optimizer

    def capture(
        self, content: SaveContent, memory: StagingMemory, preallocated: PreallocatedFile | None = None
    ) -> AsyncSave:
        """Capture files of the run's current tensors, to be written into an existing, empty directory."""
        self.saves.append(AsyncSave(content, memory, preallocated))
        return self.saves[-1]

    def before_change(self) -> None:
        """Wait until the run's tensors may change in place; call this before changing weights, moments or gradients."""
        for save in self.saves:
            save.secure()
        self.saves.clear()

    def release(self) -> None:
        """Free the memory of weights, gradient and optimizer; keep the step and the random state."""
        self.before_change()
        self._clear_gradients()
        if self.optimizer is not None:
            self.released_moments = _bytes(self.optimizer.tensors.values())
        self.optimizer = None
        for tensor in self.owned:
            tensor.data = tensor.data.new_empty(1).expand(tensor.shape)

    def reallocate(self) -> None:
        """Allocate memory for the weights again, with undefined values."""
        for tensor in self.owned:
            tensor.data = torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def make_optimizer(self, params: OptimizerParams) -> AnyOptimizer:
        """Create an optimizer without history for the run's weights."""
        return make_optimizer(self.weights, params)

    def take_step(self, optimizer: AnyOptimizer, params: OptimizerParams, norm: float) -> float:
        """Apply the waiting gradient, of norm `norm`; return the learning rate.

        Does not drop the gradient or count the step. Call `before_change` first.
        """
        return optimizer.step(params, self.step + 1, norm)

    def drop_gradient(self) -> None:
        """Discard the waiting gradient."""
        self._clear_gradients()
        self.has_gradient = False
        self.pending_tokens = 0

    def reset(self, device: torch.device) -> None:
        """Reset everything except the weights."""
        self.drop_gradient()
        self.optimizer = self.released_moments = None
        self.rng_state = seeded_rng_state(self.trained.seed, device)
        self.step = 0

    def add_gradient(self, gradients: Sequence[Tensor | None], tokens: int) -> None:
        """Add gradients over `tokens` tokens (None for no gradient) to the waiting ones; take ownership of them."""
        pairs = list(zip(self.parameters.values(), gradients, strict=True))
        # Allocate everything that can run out of memory before changing anything.
        new = [
            torch.zeros_like(p, dtype=torch.float32) if p.grad is None and gradient is None else gradient
            for p, gradient in pairs
        ]
        self.before_change()
        for (parameter, _), gradient in zip(pairs, new, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)
        self.has_gradient = True
        self.pending_tokens += tokens

    def draw_seed(self) -> tuple[int, Tensor]:
        """Draw a seed for dropout; return it and the generator's state afterwards."""
        device = next(iter(self.parameters.values())).device
        generator = torch.Generator(device)
        generator.set_state(self.rng_state)
        seed = torch.randint(1 << 62, (1,), generator=generator, device=device)
        return int(seed.item()), generator.get_state()

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def seeded_rng_state(seed: int, device: torch.device) -> Tensor:
    """Return the state of a new generator with this seed."""
    return torch.Generator(device).manual_seed(seed).get_state()

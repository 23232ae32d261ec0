"""What the engine holds of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.types import LoraConfig
from trainer_service.engine.captures import Capture
from trainer_service.engine.optimizers.base import AnyOptimizer


@dataclass(slots=True, kw_only=True)
class EngineRun:
    """A run's adapter, optimizer and counters."""

    run_id: str
    lora: LoraConfig
    targets: list[str]
    """target_modules of the adapter."""
    parameters: dict[str, nn.Parameter]
    """float32 weights by the names that PEFT gives them."""
    rng_state: Tensor
    """uint8; state of the generator that dropout's seeds are drawn from, one for each forward_backward."""
    optimizer: AnyOptimizer | None = None
    """Made by the first step; None before it."""
    step: int = 0
    """Optimizer steps taken."""
    has_gradient: bool = False
    """Whether a gradient waits for the optimizer, be it zero."""
    pending_tokens: int = 0
    """Tokens whose loss went into the waiting gradient."""
    captures: list[Capture] = field(default_factory=list)
    """What was taken of the run since it last changed."""

    def hold(self, capture: Capture) -> Capture:
        """Note that a capture holds the run's tensors; return it."""
        self.captures.append(capture)
        return capture

    def before_change(self) -> None:
        """Wait until tensors of the run may be changed in place: call it before weights, moments or gradients are."""
        for capture in self.captures:
            capture.secure()
        self.captures.clear()

    def drop_gradient(self) -> None:
        """Forget the waiting gradient."""
        self._clear_gradients()
        self.has_gradient = False
        self.pending_tokens = 0

    def reset(self, device: torch.device) -> None:
        """Forget everything but the weights."""
        self.drop_gradient()
        self.optimizer = None
        self.rng_state = seeded_rng_state(self.lora.seed, device)
        self.step = 0

    def add_gradient(self, gradients: Sequence[Tensor | None], tokens: int) -> None:
        """Add gradients, None where there is none, over `tokens` tokens to the waiting ones; takes them over."""
        pairs = list(zip(self.parameters.values(), gradients, strict=True))
        # What can run out of memory comes before anything is changed.
        new = [torch.zeros_like(p) if p.grad is None and gradient is None else gradient for p, gradient in pairs]
        self.before_change()
        for (parameter, _), gradient in zip(pairs, new, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)
        self.has_gradient = True
        self.pending_tokens += tokens

    def draw_seed(self) -> tuple[int, Tensor]:
        """Draw a seed for dropout; returns it and the state in which the generator is then."""
        device = next(iter(self.parameters.values())).device
        generator = torch.Generator(device)
        generator.set_state(self.rng_state)
        seed = torch.randint(1 << 62, (1,), generator=generator, device=device)
        return int(seed.item()), generator.get_state()

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def seeded_rng_state(seed: int, device: torch.device) -> Tensor:
    """Return the state of a fresh generator."""
    return torch.Generator(device).manual_seed(seed).get_state()

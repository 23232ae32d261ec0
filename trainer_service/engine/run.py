"""What the engine holds of one run, and how its dropout and gradient stay its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    dropouts: list[nn.Module]
    rng_state: Tensor
    """uint8; state of the generator that dropout draws from."""
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

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Add the gradients computed inside to the waiting ones; if anything is raised, leave those as they were."""
        parameters = list(self.parameters.values())
        waiting = [parameter.grad for parameter in parameters]
        self._clear_gradients()
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(parameters, waiting, strict=True):
                parameter.grad = gradient
            raise
        self.before_change()
        for parameter, gradient in zip(parameters, waiting, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def dropout(self, device: torch.device) -> Iterator[None]:
        """Turn the run's dropout on, drawing from its own generator, which advances only if nothing is raised."""
        for module in self.dropouts:
            module.train()
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                _set_rng_state(self.rng_state, device)
                yield
                self.rng_state = _get_rng_state(device)
        finally:
            for module in self.dropouts:
                module.eval()


def seeded_rng_state(seed: int, device: torch.device) -> Tensor:
    """Return the state of a fresh generator."""
    return torch.Generator(device).manual_seed(seed).get_state()


def _get_rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_rng_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)

"""What the engine holds of one run, and how its dropout and gradient stay its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.types import LoraConfig
from trainer_service.engine.optimizers.base import AnyOptimizer, gradient_of
from trainer_service.engine.ranks import Ranks


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

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each weight, zeros where there is none yet; not copies."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [gradient_of(parameter) for parameter in self.parameters.values()]

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
        for parameter, gradient in zip(parameters, waiting, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def dropout(self, device: torch.device, ranks: Ranks) -> Iterator[None]:
        """Turn the run's dropout on, drawing from its own generator, which advances only if nothing is raised.

        Of several ranks each draws masks of its own, from a seed that the run's generator gives them all.
        """
        for module in self.dropouts:
            module.train()
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                _set_rng_state(self.rng_state, device)
                after = _part_ways(ranks.rank, device) if ranks.size > 1 and self.lora.dropout else None
                yield
                self.rng_state = _get_rng_state(device) if after is None else after
        finally:
            for module in self.dropouts:
                module.eval()


def seeded_rng_state(seed: int, device: torch.device) -> Tensor:
    """Return the state of a fresh generator."""
    return torch.Generator(device).manual_seed(seed).get_state()


def _part_ways(rank: int, device: torch.device) -> Tensor:
    """Draw a seed, go on from it and the rank, and return the generator's state after the draw."""
    seed = int(torch.randint(1 << 62, (), device=device))
    after = _get_rng_state(device)
    _set_rng_state(seeded_rng_state(seed + rank, device), device)
    return after


def _get_rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_rng_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)

"""Measure the size of each optimizer's state and the time of its step, on adapters of the embedded model.

    make bench-optimizers

The size is that of the tensors that a run's optimizer holds after a step, in bytes per trained parameter. Each round
times every optimizer once, and torch's plain loop over weights (foreach and fused off). Medians and 99th percentiles
are printed, and the budget of the fused AdamW against that loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from make_model import default_directory, make_model
from torch import nn

from bench.budgets import budget
from paceline.types import ApolloParams, LoraConfig, OptimizerParams
from paceline.types.optimizers import OPTIMIZERS
from trainer_service.engine.model.base_model import load_base_model
from trainer_service.engine.optimizers.base import AnyOptimizer
from trainer_service.engine.optimizers.make import make_optimizer
from trainer_service.engine.runs import lora_run
from trainer_service.engine_link.options import EngineOptions

FUSED_BUDGET = 3.0
LOOP = "plain loop"
LOW_RANK = "apollo, rank 4"


def adapter_weights(model: Path, rank: int, device: str) -> dict[str, nn.Parameter]:
    """Create the weights of one run's adapter, each with a gradient."""
    lora = LoraConfig(rank=rank)
    base = load_base_model(EngineOptions(str(model), "embedded", device=device))
    lora_run.adapt(base)
    targets = lora_run.target_modules(base, lora)
    weights = lora_run.make_lora_run(base, "run", lora, targets, "", torch.device(device)).parameters
    for weight in weights.values():
        weight.grad = torch.randn_like(weight)
    return weights


def loop_step(weights: dict[str, nn.Parameter]) -> Callable[[int], None]:
    """Return torch's AdamW step over one weight after the other, each operation by itself."""
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-4, betas=(0.9, 0.95), eps=1e-12, foreach=False, fused=False)
    return lambda _: optimizer.step()


def own_step(optimizer: AnyOptimizer) -> Callable[[int], object]:
    """Return the step of one of our optimizers with its defaults."""
    return lambda step: optimizer.step(optimizer.params, step, 1.0)


def measure(weights: dict[str, nn.Parameter], rounds: int) -> None:
    """Time the steps; print the table and the budget."""
    params: dict[str, OptimizerParams] = {name: kind() for name, kind in OPTIMIZERS.items()}
    made = {name: make_optimizer(weights, own) for name, own in (params | {LOW_RANK: ApolloParams(rank=4)}).items()}
    steps = {name: own_step(optimizer) for name, optimizer in made.items()}
    steps[LOOP] = loop_step(weights)
    device = next(iter(weights.values())).device
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(1, rounds + 2):
        order = list(steps)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name].append(timed(steps[name], number, device))
    milliseconds = {name: np.array(seconds[1:]) * 1e3 for name, seconds in times.items()}  # The first warms up.
    count = sum(weight.numel() for weight in weights.values())
    print(f"{len(weights)} weights, {count:,} parameters, on {device}, {rounds} rounds")
    for name, values in milliseconds.items():
        bytes_each = sum(t.nbytes for t in made[name].tensors.values()) / count if name in made else 8.0
        print(f"{name:14} {bytes_each:8.4f} bytes per parameter, "
              f"step p50 {np.median(values):8.2f} ms, p99 {np.percentile(values, 99):8.2f} ms")  # fmt: skip
    ratio = float(np.median(milliseconds[LOOP]) / np.median(milliseconds["adamw"]))
    budget("fused AdamW against one weight after the other", ratio, FUSED_BUDGET)


def timed(step: Callable[[int], object], number: int, device: torch.device) -> float:
    """Return the seconds of a step, until the device is done."""
    start = time.perf_counter()
    step(number)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    measure(adapter_weights(make_model(default_directory()), options.rank, options.device), options.rounds)


if __name__ == "__main__":
    main()

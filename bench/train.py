"""How fast the trainer is, beside what a first trainer on transformers and PEFT does, on ragged RL batches.

    make bench-train        python bench/train.py [--rounds 5] [--datums 6] [--models smollm2 qwen2.5-0.5b]

Every arm is a process of its own on the same core with one thread, and works while the others wait. Each round draws a
new batch for all of them. Ours is the trainer service, called over gRPC; its time is the caller's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from make_model import default_directory, make_model
from train_batches import Model, draw_batch, load_model, make_random_model, save_batch
from train_ours import Trainer, start_trainer

from paceline.types import Datum

OURS = "paceline bfloat16"
OTHERS = ("padded float32", "padded bfloat16", "one at a time, checkpointed", "one at a time")
TIMES_FASTER = {"padded float32": 7.0, "padded bfloat16": 3.5, "one at a time, checkpointed": 3.0}
FLOP_PER_WEIGHT = 4
"""A token's forward and backward through a frozen weight: a product for the output, one for the input's gradient."""


@dataclass
class Figures:
    """What was measured for one model."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    product_rates: list[float] = field(default_factory=list)
    way_seconds: list[float] = field(default_factory=list)

    def add(self, arm: str, seconds: float, peak: float) -> None:
        """Note one round of an arm."""
        self.seconds.setdefault(arm, []).append(seconds)
        self.peaks[arm] = peak

    def speed(self, arm: str) -> np.ndarray[Any, Any]:
        """Real tokens a second in each round."""
        return np.asarray(self.tokens) / np.asarray(self.seconds[arm])


@contextmanager
def start_arm(arm: str, model: Model, adapter: Path, core: int, clock: str = "wall") -> Iterator[subprocess.Popen[str]]:
    """Run one of the other arms."""
    command = [sys.executable, str(Path(__file__).with_name("train_arm.py")), arm, model.path, str(adapter), clock]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        os.sched_setaffinity(process.pid, {core})
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], batch: Path, *, compare: bool = False) -> dict[str, float]:
    """Have an arm do one batch."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"batch": str(batch), "compare": compare}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"an arm ended with status {process.wait()}")
    reply: dict[str, float] = json.loads(line)
    return reply


def sampled(trainer: Trainer, data: list[Datum]) -> list[Datum]:
    """Give the batch a sampler's log-probabilities: the model's own, moved a little."""
    _, (_, logprobs) = trainer.forward_backward(data, forward_only=True)
    rng = np.random.default_rng(0)
    return [
        replace(datum, loss_inputs={**datum.loss_inputs, "logprobs": np.nan_to_num(own + _noise(rng, own)).clip(max=0)})
        for datum, own in zip(data, logprobs, strict=True)
    ]


def _noise(rng: np.random.Generator, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return rng.normal(0, 0.1, like.shape).astype(np.float32)


def prepare(trainer: Trainer, data: list[Datum]) -> Path:
    """Take a step, so that neither half of the adapter is zero, then save the state with a gradient waiting."""
    trainer.forward_backward(data)
    trainer.optim_step(1e-2)
    trainer.forward_backward(data)
    return trainer.save_state("waiting")


def check_numbers(model: Model, size: int, scratch: Path, core: int) -> None:
    """Compare loss and gradient in both dtypes with the padded float32 arm, on the same weights."""
    for dtype in ("float32", "bfloat16"):
        with start_trainer(model.path, dtype, scratch / f"check-{dtype}", core, "wall") as trainer:
            data = sampled(trainer, draw_batch(min(size, 3), model.vocab_size, seed=99))
            directory = prepare(trainer, data)
            _, (loss, _) = trainer.forward_backward(data, forward_only=True)
        with start_arm("padded float32", model, directory, core) as arm:
            reply = ask(arm, save_batch(data, scratch / f"check-{dtype}.npz"), compare=True)
        error = abs(loss - reply["loss"]) / abs(reply["loss"])
        if dtype == "float32":
            budget(f"{model.name} float32 loss against padded float32", error, 2e-5, at_most=True)
        else:
            print(f"{model.name} bfloat16: loss differs by {error:.1e} of itself")
            budget(f"{model.name} bfloat16 gradient cosine", reply["cosine"], 0.999)


def measure(model: Model, options: argparse.Namespace, scratch: Path) -> Figures:
    """Run all arms, a round at a time."""
    figures = Figures()
    with ExitStack() as stack:
        trainer = stack.enter_context(
            start_trainer(model.path, "bfloat16", scratch / "timed", options.core, options.clock)
        )
        adapter = prepare(trainer, draw_batch(2, model.vocab_size, seed=0))
        arms = {
            arm: stack.enter_context(start_arm(arm, model, adapter, options.core, options.clock))
            for arm in options.arms
        }
        for seed in range(options.rounds + 1):
            data = sampled(trainer, draw_batch(options.datums, model.vocab_size, seed))
            path = save_batch(data, scratch / f"{seed}.npz")
            one_round(trainer, arms, data, path, figures if seed else Figures())  # The first warms up.
    return figures


def one_round(
    trainer: Trainer, arms: dict[str, subprocess.Popen[str]], data: list[Datum], path: Path, figures: Figures
) -> None:
    """Have each arm do the batch once, in turn."""
    seconds, _ = trainer.forward_backward(data)
    figures.way_seconds.append(trainer.way(data))
    trainer.optim_step(1e-4)
    figures.tokens.append(sum(len(datum.model_input) for datum in data))
    figures.add(OURS, seconds, trainer.peak())
    for arm, process in arms.items():
        reply = ask(process, path)
        figures.add(arm, reply["seconds"], reply["peak"])
        figures.product_rates.append(reply["product_rate"])


def loss_memory(model: Model, scratch: Path, core: int) -> float:
    """Growth of the peak from one chunk of labelled positions to eight, over the size of the logits not held."""
    peaks = []
    with start_trainer(model.path, "bfloat16", scratch / "memory", core, "wall") as trainer:
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, 2049).tolist()
        for labelled in (256, 2048):
            prompt, completion = tokens[:-labelled], tokens[-labelled:]
            datum = Datum.from_completion(prompt, completion, logprobs=-1.0, advantages=1.0)
            for _ in range(2):  # The second finds the memory that the first left.
                trainer.forward_backward([datum])
            peaks.append(trainer.peak())
    return (peaks[1] - peaks[0]) / ((2048 - 256) * model.vocab_size * 2)


def report(model: Model, figures: Figures) -> None:
    """Print the table and the budgets of one model."""
    rate = float(np.median(figures.product_rates))
    ours = figures.speed(OURS)
    print(f"\n{model.name}: {model.parameters / 1e6:.0f} M parameters, bfloat16 products {rate / 1e9:.0f} GFLOP/s")
    print(f"{len(figures.tokens)} rounds of {min(figures.tokens)} to {max(figures.tokens)} tokens")
    print(f"{'arm':30}{'tokens/s':>9}{'s median':>10}{'s p99':>8}{'peak MiB':>10}{'of GEMM':>9}{'ours':>7}")
    for arm, seconds in figures.seconds.items():
        speed = figures.speed(arm)
        share = FLOP_PER_WEIGHT * model.parameters * np.median(speed) / rate
        print(f"{arm:30}{np.median(speed):9.0f}{np.median(seconds):10.2f}{np.percentile(seconds, 99):8.2f}"
              f"{figures.peaks[arm] / 2**20:10.0f}{share:9.0%}{np.median(ours / speed):6.1f}x")  # fmt: skip
    for arm, times in TIMES_FASTER.items():
        if arm in figures.seconds:
            budget(f"{model.name} against {arm}", float(np.median(ours / figures.speed(arm))), times)
    if model.parameters > 3e8:
        share = FLOP_PER_WEIGHT * model.parameters * float(np.median(ours)) / rate
        budget(f"{model.name} share of the bfloat16 GEMM rate", share, 0.4)
    way = np.asarray(figures.way_seconds) / np.asarray(figures.seconds[OURS])
    budget(f"{model.name} share of RPC and serialisation", float(np.median(way)), 0.02, at_most=True)


def budget(name: str, figure: float, limit: float, *, at_most: bool = False) -> None:
    """Print one budget's line."""
    met = figure <= limit if at_most else figure >= limit
    print(
        f"budget {name}: {figure:.4g} ({'<=' if at_most else '>='} {limit:g}) {'met' if met else 'missed'}", flush=True
    )


def main() -> None:
    """Measure each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--datums", type=int, default=6, help="sequences in a batch")
    parser.add_argument("--models", nargs="+", default=["smollm2", "qwen2.5-0.5b"], help="which of the two")
    parser.add_argument("--arms", nargs="*", default=OTHERS, choices=OTHERS, help="beside ours")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="where every arm works")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu where others use the machine too")
    parser.add_argument("--skip-checks", action="store_true", help="measure times alone")
    options = parser.parse_args()
    for name in options.models:
        with TemporaryDirectory() as directory:
            scratch = Path(directory)
            path = make_model(default_directory()) if name == "smollm2" else make_random_model(scratch / name)
            model = load_model(name, path)
            report(model, measure(model, options, scratch))
            if not options.skip_checks:
                growth = loss_memory(model, scratch, options.core)
                budget(f"{name} loss memory growth, share of the logits", growth, 0.05, at_most=True)
                check_numbers(model, options.datums, scratch, options.core)


if __name__ == "__main__":
    main()

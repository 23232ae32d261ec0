"""Measure the trainer's speed on ragged RL batches, beside other arms that use transformers and PEFT.

    make bench-train        python -m bench.train [--rounds 5] [--models smollm2 qwen2.5-0.5b] [--device cpu]

Every arm is a separate process. On a CPU all arms run on the same core with one thread, and each works while the others
wait; on a GPU one arm at a time is in memory, started for each round. Each round draws a new batch for all of them. Our
arm is the trainer service, called over gRPC; its time is the caller's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from make_model import default_directory, make_model
from numpy.typing import NDArray

from bench.budgets import budget
from bench.device import add_device_option
from bench.random_models import make_random_model
from bench.train.batches import Model, draw_batch, load_model, save_batch
from bench.train.cases import CASES, FOR_DEVICE, Case
from bench.train.ours import Trainer, TrainerOptions, start_trainer
from bench.train.report import OURS, Figures, report
from paceline.types import Datum

TRL = Path(sys.prefix) / "trl"
"""Where the make target installs TRL, separate from everything else."""


class Stage:
    """Starts the arms: once for all rounds on a CPU, for each round on a GPU."""

    def __init__(self, model: Model, case: Case, options: argparse.Namespace, scratch: Path) -> None:
        self._model, self._case, self._options, self._scratch = model, case, options, scratch
        self._kept = ExitStack()
        self._running: dict[str, Any] = {}
        self._started = 0

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self._kept.close()

    @contextmanager
    def ours(self, *settings: str) -> Iterator[Trainer]:
        """Yield the trainer, with further settings, and a run on it."""
        self._started += 1
        state = self._scratch / f"timed-{self._started}"
        options = self._trainer_options("bfloat16", settings)
        with self._kept_or_fresh(ours_with(settings), lambda: start_trainer(options, state)) as trainer:
            yield trainer

    @contextmanager
    def other(self, arm: str, adapter: Path, warmup: Path) -> Iterator[subprocess.Popen[str]]:
        """Yield the process of an arm that has done a batch."""
        with self._kept_or_fresh(arm, lambda: self._start(arm, adapter, warmup)) as process:
            yield process

    @contextmanager
    def alone(self, dtype: str, name: str) -> Iterator[Trainer]:
        """Yield a trainer while no other arm runs."""
        with start_trainer(self._trainer_options(dtype), self._scratch / name) as trainer:
            yield trainer

    @contextmanager
    def _kept_or_fresh(self, arm: str, start: Any) -> Iterator[Any]:
        if self._options.device == "cuda":
            with start() as running:
                yield running
            return
        if arm not in self._running:
            self._running[arm] = self._kept.enter_context(start())
        yield self._running[arm]

    @contextmanager
    def _start(self, arm: str, adapter: Path, warmup: Path) -> Iterator[subprocess.Popen[str]]:
        with start_arm(arm, self._model, adapter, self._options) as process:
            ask(process, warmup)
            yield process

    def _trainer_options(self, dtype: str, settings: Sequence[str] = ()) -> TrainerOptions:
        o, all_settings = self._options, (*self._options.set, *settings)
        return TrainerOptions(self._model.path, dtype, o.device, o.core, o.clock, self._case.pack_tokens, all_settings)


def ours_with(settings: Sequence[str]) -> str:
    """Name our arm with further settings."""
    return ", ".join((OURS, *settings))


@contextmanager
def start_arm(
    arm: str, model: Model, adapter: Path, options: argparse.Namespace, clock: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run one of the other arms."""
    arguments = [arm, model.path, str(adapter), clock or options.clock, options.device]
    command = [sys.executable, "-m", "bench.train.arms", *arguments]
    environment = os.environ | ({"PYTHONPATH": str(TRL)} if arm.startswith("TRL") and TRL.is_dir() else {})
    if options.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
        if options.device == "cpu":
            os.sched_setaffinity(process.pid, {options.core})
        try:
            yield process
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def ask(process: subprocess.Popen[str], batch: Path, *, compare: bool = False) -> dict[str, float]:
    """Have an arm compute one batch."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps({"batch": str(batch), "compare": compare}) + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"an arm ended with status {process.wait()}; -9 may be for want of memory: use fewer --datums")
    reply: dict[str, float] = json.loads(line)
    return reply


def sampled(trainer: Trainer, data: list[Datum]) -> list[Datum]:
    """Give the batch a sampler's log-probabilities: the model's own plus a little noise."""
    _, (_, logprobs) = trainer.forward_backward(data, forward_only=True)
    rng = np.random.default_rng(0)
    return [
        replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "logprobs": (own + _noise(rng, own)).clip(max=0)})
        for datum, own in zip(data, logprobs, strict=True)
    ]


def _noise(rng: np.random.Generator, like: NDArray[Any]) -> NDArray[np.float32]:
    return rng.normal(0, 0.1, like.shape).astype(np.float32)


def prepare(trainer: Trainer, data: list[Datum]) -> Path:
    """Take a step, so that neither half of the adapter is zero, then save the state with a pending gradient."""
    trainer.forward_backward(data)
    trainer.optim_step(1e-2)
    trainer.forward_backward(data)
    return trainer.save_state("waiting")


def check_numbers(stage: Stage, model: Model, size: int, options: argparse.Namespace, scratch: Path) -> None:
    """Compare loss and gradient in both dtypes with the padded float32 arm, on the same weights."""
    for dtype in ("float32", "bfloat16"):
        with stage.alone(dtype, f"check-{dtype}") as trainer:
            data = sampled(trainer, draw_batch(min(size, 3), model.vocab_size, seed=99))
            directory = prepare(trainer, data)
            _, (loss, _) = trainer.forward_backward(data, forward_only=True)
        with start_arm("padded float32", model, directory, options, "wall") as arm:
            reply = ask(arm, save_batch(data, scratch / f"check-{dtype}.npz"), compare=True)
        error = abs(loss - reply["loss"]) / abs(reply["loss"])
        if dtype == "float32":
            budget(f"{model.name} float32 loss against padded float32", error, 2e-5, at_most=True)
        else:
            print(f"{model.name} bfloat16: loss differs by {error:.1e} of itself")
            budget(f"{model.name} bfloat16 gradient cosine", reply["cosine"], 0.999)


def measure(stage: Stage, model: Model, options: argparse.Namespace, scratch: Path) -> Figures:
    """Run all arms, a round at a time."""
    figures = Figures()
    with stage.ours() as trainer:
        adapter = prepare(trainer, draw_batch(2, model.vocab_size, seed=0))
        batches = [
            sampled(trainer, draw_batch(options.datums, model.vocab_size, seed, options.length))
            for seed in range(options.rounds + 1)
        ]
    paths = [save_batch(data, scratch / f"{seed}.npz") for seed, data in enumerate(batches)]
    for data, path in zip(batches[1:], paths[1:], strict=True):
        figures.tokens.append(sum(len(datum.model_input) for datum in data))
        for settings in ((), *((setting,) for setting in options.variants)):
            with stage.ours(*settings) as trainer:
                our_round(trainer, ours_with(settings), batches[0], data, figures)
        for arm in options.arms:
            with stage.other(arm, adapter, paths[0]) as process:
                reply = ask(process, path)
                figures.add(arm, reply["seconds"], reply["peak"])
                figures.product_rates.append(reply["product_rate"])
    return figures


def our_round(trainer: Trainer, arm: str, warmup: list[Datum], data: list[Datum], figures: Figures) -> None:
    """Time a batch after a warm-up batch, and the RPC overhead."""
    trainer.forward_backward(warmup)
    trainer.optim_step(1e-4)
    seconds, _ = trainer.forward_backward(data)
    if arm == OURS:
        figures.way_seconds.append(trainer.way(data))
    trainer.optim_step(1e-4)
    figures.add(arm, seconds, trainer.peak())


def loss_memory(stage: Stage, model: Model) -> float:
    """Return the growth of peak memory from 1,024 to 4,096 labelled positions, over the size of the added logits."""
    peaks = []
    with stage.alone("bfloat16", "memory") as trainer:
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, 4097).tolist()
        for labelled in (1024, 4096):
            prompt, completion = tokens[:-labelled], tokens[-labelled:]
            datum = Datum.from_completion(prompt, completion, logprobs=-1.0, advantages=1.0)
            for _ in range(2):  # The second reuses the memory that the first left.
                trainer.forward_backward([datum])
            peaks.append(trainer.peak())
    return (peaks[1] - peaks[0]) / ((4096 - 1024) * model.vocab_size * 2)


def run(name: str, options: argparse.Namespace, scratch: Path) -> None:
    """Measure with one model and print the results."""
    case = CASES[name]
    shape = case.shape or name
    path = make_model(default_directory()) if name == "smollm2" else make_random_model(shape, scratch / shape)
    model = load_model(name, path)
    chosen = argparse.Namespace(**vars(options))
    chosen.datums = options.datums or case.datums
    chosen.length = options.length or case.length
    chosen.arms = case.arms if options.arms is None else options.arms
    with Stage(model, case, chosen, scratch) as stage:
        report(model, measure(stage, model, chosen, scratch), case)
    if not options.skip_checks:
        stage = Stage(model, case, chosen, scratch)
        budget(f"{name} loss memory growth, share of the logits", loss_memory(stage, model), 0.05, at_most=True)
        check_numbers(stage, model, chosen.datums, chosen, scratch)


def main() -> None:
    """Measure with each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--datums", type=int, help="sequences in a batch")
    parser.add_argument("--length", type=int, help="of every sequence, all labelled; by default as the case says")
    parser.add_argument("--models", nargs="+", choices=CASES, help="by default those for the device")
    parser.add_argument("--arms", nargs="*", help="beside ours; by default those of the model")
    add_device_option(parser)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="where every arm works")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu where others use the machine too")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="more settings of the trainer")
    parser.add_argument(
        "--variants", nargs="*", default=[], metavar="NAME=VALUE", help="settings, each a further arm of ours"
    )
    parser.add_argument("--skip-checks", action="store_true", help="measure times alone")
    options = parser.parse_args()
    for name in options.models or FOR_DEVICE[options.device]:
        with TemporaryDirectory() as directory:
            run(name, options, Path(directory))


if __name__ == "__main__":
    main()

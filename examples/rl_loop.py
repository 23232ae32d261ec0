r"""Reinforcement learning, end to end: sample, score, train, publish, and repeat with the new weights.

    python examples/rl_loop.py [--steps 32] [--seed 0] [--out results]

The model completes fact sheets ("Country: Peru\nCapital:") and gets 1 for exactly the capital's name, 0 for anything
else (see tasks.py). Each step samples a group of completions per prompt from the newest version, turns each group's
rewards into advantages, takes one optimizer step and publishes the next version.

The run stays, with its checkpoints: `ServiceClient.delete_run` deletes it.

Needs a running gateway: `make up` in another terminal prints the two variables to export. `make demo` does all of it.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tasks import HELD_OUT, MAX_TOKENS, STOP, Question, questions, reward

import paceline
from paceline import AdamParams, Datum, SampleResult, SamplingParams

SAVE_EVERY = 8  # steps between state checkpoints: the most to repeat after RunStateLost


@dataclass
class StepReport:
    """One row of the table."""

    step: int
    reward: float
    tokens: int
    publish_ms: float
    version: int
    seconds: float


def main() -> None:
    """Run the loop and show the results."""
    options = parse_options()
    rng = random.Random(options.seed)
    console = Console()
    with paceline.ServiceClient() as service:
        training = service.create_lora_training_client(
            rank=options.rank, seed=options.seed, user_metadata={"example": "rl_loop"}
        )
        loop = Loop(service, training, options)
        draw = questions(rng)
        before = loop.evaluate()
        reports: list[StepReport] = []
        with progress_bar(console) as progress:
            bar = progress.add_task("training", total=options.steps, reward="")
            while len(reports) < options.steps:
                try:
                    reports.append(loop.step([next(draw) for _ in range(options.prompts)]))
                except paceline.errors.RunStateLost as lost:
                    # The trainer lost the run's state. Continue from the last checkpoint, if there is one.
                    if not lost.metadata["checkpoint"]:
                        raise
                    training.load_state_with_optimizer(lost.metadata["checkpoint"]).result()
                    loop.publish()
                    continue
                progress.update(bar, advance=1, reward=f"reward {reports[-1].reward:.2f}")
                if not console.is_terminal:  # where no bar is drawn
                    console.print(describe(reports[-1], options.steps))
        after = loop.evaluate()
        training.save_weights_for_sampler("final").result()
    show(console, reports, before, after, options.out)


class Loop:
    """The loop's state: the run and the weights to sample from."""

    def __init__(
        self, service: paceline.ServiceClient, training: paceline.TrainingClient, options: argparse.Namespace
    ) -> None:
        self.service = service
        self.training = training
        self.options = options
        self.tokenizer = training.get_tokenizer()
        self.params = SamplingParams(max_tokens=MAX_TOKENS, stop=STOP)
        self.publish_ms = 0.0
        self.steps = 0
        training.save_state("start").result()
        self.publish()

    def publish(self) -> None:
        """Publish the current weights as a new version and sample from exactly that version."""
        start = perf_counter()
        published = self.training.publish_weights(wait_for="all").result()
        self.publish_ms = 1e3 * (perf_counter() - start)
        self.version = published.model.version
        self.sampling = self.service.create_sampling_client(run_id=self.training.run_id, version=self.version)

    def step(self, batch: list[Question]) -> StepReport:
        """Sample groups, score them, take one optimizer step, publish."""
        start = perf_counter()
        results = self.sample(batch, self.options.samples)
        rewards = [self.score(question, result) for question, result in zip(batch, results, strict=True)]
        data = [datum for parts in zip(batch, results, rewards, strict=True) for datum in self.make_data(*parts)]
        if data:  # nothing to learn if rewards are equal within every group
            # Both are issued before either is awaited, so the trainer does not pause between them.
            loss = self.training.forward_backward(data, "importance_sampling")
            update = self.training.optim_step(AdamParams(learning_rate=self.options.learning_rate))
            loss.result(), update.result()
        self.publish()
        self.steps += 1
        if self.steps % SAVE_EVERY == 0:
            self.training.save_state("latest", overwrite=True).result()
        tokens = sum(len(sequence.tokens) for result in results for sequence in result.sequences)
        seconds = perf_counter() - start
        return StepReport(self.steps, float(np.mean(rewards)), tokens, self.publish_ms, self.version, seconds)

    def sample(self, batch: list[Question], num_samples: int) -> list[SampleResult]:
        """Sample all prompts concurrently; the sampler shares each prompt among its completions."""
        futures = [self.sampling.sample(self.encode(question), num_samples, self.params) for question in batch]
        return [future.result() for future in futures]

    def score(self, question: Question, result: SampleResult) -> np.ndarray:
        """Reward each completion of a group: 1 for exactly the answer, else 0."""
        texts = [str(self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)) for sequence in result.sequences]
        return np.array([reward(text, question.answer) for text in texts])

    def make_data(self, question: Question, result: SampleResult, rewards: np.ndarray) -> list[Datum]:
        """Make one datum per completion, with its advantage over the group's mean on each of its tokens."""
        advantages = rewards - rewards.mean()
        if not advantages.any():
            return []
        prompt = self.encode(question)
        return [
            Datum.from_completion(prompt, sequence.tokens, logprobs=sequence.logprobs, advantages=advantage)
            for sequence, advantage in zip(result.sequences, advantages, strict=True)
        ]

    def evaluate(self) -> float:
        """Return the mean reward on questions that are never trained on."""
        results = self.sample(list(HELD_OUT), self.options.samples)
        scores = [self.score(question, result) for question, result in zip(HELD_OUT, results, strict=True)]
        return float(np.mean(scores))

    def encode(self, question: Question) -> list[int]:
        """Return the prompt's token ids."""
        tokens: list[int] = self.tokenizer.encode(question.prompt, add_special_tokens=False)
        return tokens


def describe(report: StepReport, steps: int) -> str:
    """Describe a step in a line."""
    return (
        f"step {report.step} of {steps}: reward {report.reward:.2f}, version {report.version}, {report.seconds:.1f} s"
    )


def show(console: Console, reports: list[StepReport], before: float, after: float, out: Path) -> None:
    """Print the table, draw the curve, save the numbers."""
    table = Table(title="Reinforcement learning through Paceline")
    for heading in ("step", "mean reward", "tokens", "publish ms", "version"):
        table.add_column(heading, justify="right")
    for report in reports:
        table.add_row(str(report.step), f"{report.reward:.3f}", str(report.tokens), f"{report.publish_ms:.1f}",
                      str(report.version))  # fmt: skip
    console.print(table)
    quarter = max(1, len(reports) // 4)
    rewards = [report.reward for report in reports]
    publish = np.percentile([report.publish_ms for report in reports], [50, 99])
    first, last = float(np.mean(rewards[:quarter])), float(np.mean(rewards[-quarter:]))
    console.print(f"mean reward: first quarter {first:.3f}, last quarter {last:.3f} ([bold]{last - first:+.3f}[/bold])")
    console.print(f"on countries never trained on: before {before:.3f}, after {after:.3f}")
    console.print(f"publish: p50 {publish[0]:.1f} ms, p99 {publish[1]:.1f} ms")
    out.mkdir(parents=True, exist_ok=True)
    facts = {"first_quarter": first, "last_quarter": last, "held_out": [before, after]}
    (out / "rewards.json").write_text(json.dumps({**facts, "steps": [asdict(report) for report in reports]}, indent=1))
    console.print(f"reward curve: {draw_curve(rewards, out / 'reward.png')}")


def draw_curve(rewards: list[float], path: Path) -> Path:
    """Draw reward over steps, with its moving mean."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed once

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    steps, window = np.arange(1, len(rewards) + 1), max(1, len(rewards) // 6)
    means = [np.mean(rewards[max(0, index - window + 1) : index + 1]) for index in range(len(rewards))]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    axes.plot(steps, rewards, "o", color="#9db8d9", markersize=4, label="each step")
    axes.plot(steps, means, color="#1f4e8c", linewidth=2, label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Exact match on capitals of the world")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)
    plt.close(figure)
    return path


def progress_bar(console: Console) -> Progress:
    """Make the progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[reward]}"))
    return Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="of AdamW")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--seed", type=int, default=0, help="of the adapter and the prompts")
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory of the curve and the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()

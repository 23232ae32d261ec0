r"""Reinforcement learning, end to end: sample, score, train, publish, and repeat with the new weights.

    python examples/rl_loop.py [--steps 32] [--seed 0] [--name mine] [--out results]

The model completes fact sheets ("Country: Peru\nCapital:") and gets 1 for exactly the capital's name, 0 for anything
else (see tasks.py). Each step publishes the weights as a version, samples a group of completions per prompt from it,
turns each group's rewards into advantages, and takes one optimizer step.

If this script is killed, start it again: it finds its run by name and continues at the step that the run has. What is
random in a step comes from the seed and the step's number alone, so the step that was interrupted is made again as it
was. What it measured is kept in --out, so the table and the curve show all steps of the run. At the end the run and its
state checkpoints are deleted; the adapter stays, as a checkpoint.

Needs a running gateway: `make up` in another terminal prints the two variables to export. `make demo` does all of it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from history import History, StepReport, write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tasks import HELD_OUT, MAX_TOKENS, STOP, Question, questions, reward

import paceline
from paceline import AdamParams, CheckpointKind, Datum, SampleResult, SamplingClient, SamplingParams
from paceline.recipes.runs import attach, until_superseded

SAVE_EVERY = 8  # steps between state checkpoints: the most to repeat after RunStateLost
SHOWN = HELD_OUT[:3]
MOST_BATCHES = 16  # to draw for a step, until the rewards of a group differ


def main() -> None:
    """Run the loop and show the results."""
    options = parse_options()
    console = Console()
    with until_superseded(), paceline.ServiceClient() as service:
        training = attach(service, options.name, options.settings, print) or service.create_lora_training_client(
            rank=options.rank,
            seed=options.seed,
            user_metadata={"name": options.name, "settings": options.settings},
        )
        history = History(options.out, training.run_id)
        loop = Loop(service, training, options, history)
        step = training.get_info().step
        with progress_bar(console) as progress:
            bar = progress.add_task("training", total=options.steps, reward="")
            while step < options.steps:
                progress.update(bar, completed=step)
                try:
                    report = loop.step(step)
                except paceline.errors.RunStateLost as lost:
                    # The trainer lost the run's state. Continue from the last checkpoint, if there is one.
                    if not lost.metadata["checkpoint"]:
                        raise
                    step = training.load_state_with_optimizer(lost.metadata["checkpoint"]).result().step
                    continue
                if report is None:
                    console.print(
                        f"nothing is left to learn: in {MOST_BATCHES} batches all rewards of a group were equal"
                    )
                    break
                step = report.step
                progress.update(bar, completed=step, reward=f"reward {report.reward:.2f}")
                if not console.is_terminal:  # where no bar is drawn
                    console.print(describe(report, options.steps))
        before = loop.evaluate(service.create_sampling_client())  # the base model, from which the run started
        after = loop.evaluate(loop.publish())
        final = training.save_weights_for_sampler("final", overwrite=True).result()
        show(console, history.reports(step), before, after, options.out)
        for question, was, now in zip(SHOWN, before.answers, after.answers, strict=True):
            console.print(
                f"{question.prompt!r}: {was} before, {now} after", highlight=False, markup=False, soft_wrap=True
            )
        console.print(f"adapter: {final.path}")
        for saved in service.list_checkpoints(training.run_id, CheckpointKind.STATE):
            service.delete_checkpoint(saved)
        service.delete_run(training.run_id)  # the adapter stays
        history.remove()


@dataclass
class Evaluation:
    """What weights make of questions that are never trained on."""

    score: float
    """Mean reward of all samples."""
    answers: list[str]
    """For each question in `SHOWN`, a completion, and how often it was right."""


class Loop:
    """The loop's parts: publish, sample, score, train."""

    def __init__(
        self,
        service: paceline.ServiceClient,
        training: paceline.TrainingClient,
        options: argparse.Namespace,
        history: History,
    ) -> None:
        self.service = service
        self.training = training
        self.options = options
        self.history = history
        self.tokenizer = training.get_tokenizer()
        self.publish_ms = 0.0

    def step(self, done: int) -> StepReport | None:
        """Take the step after `done` others; None if there is nothing to learn."""
        start = perf_counter()
        rng = random.Random(f"{self.options.seed} {done}")  # of this step alone, so that it can be made again
        if done % SAVE_EVERY == 0:
            self.training.save_state("latest", overwrite=True).result()
        sampling = self.publish()
        draw = questions(rng)
        rewards: list[float] = []
        tokens = 0
        for _ in range(MOST_BATCHES):
            batch = [next(draw) for _ in range(self.options.prompts)]
            results = self.sample(sampling, batch, rng)
            scores = [self.score(question, result) for question, result in zip(batch, results, strict=True)]
            rewards += np.concatenate(scores).tolist()
            tokens += sum(len(sequence.tokens) for result in results for sequence in result.sequences)
            data = [datum for parts in zip(batch, results, scores, strict=True) for datum in self.make_data(*parts)]
            if data:
                break
        else:
            return None
        report = StepReport(
            done + 1,
            float(np.mean(rewards)),
            tokens,
            self.publish_ms,
            sampling.model.version or 0,
            perf_counter() - start,
        )
        self.history.put(report)  # before the step, which may be taken though this script is killed
        # Both are issued before either is awaited, so the trainer does not pause between them. The step is not taken
        # on a part of the batch.
        passed = self.training.forward_backward(data, "importance_sampling")
        params = AdamParams(learning_rate=self.options.learning_rate)
        update = self.training.optim_step(params, only_if_succeeded=passed)
        passed.result()
        report = replace(report, step=update.result().step, seconds=perf_counter() - start)
        self.history.put(report)
        return report

    def publish(self) -> SamplingClient:
        """Publish the current weights as a new version; return a client that samples from exactly that version."""
        start = perf_counter()
        version = self.training.publish_weights(wait_for="all").result().model.version
        self.publish_ms = 1e3 * (perf_counter() - start)
        return self.service.create_sampling_client(run_id=self.training.run_id, version=version)

    def sample(self, sampling: SamplingClient, batch: Sequence[Question], rng: random.Random) -> list[SampleResult]:
        """Sample a group for each prompt, all concurrently; the sampler shares each prompt among its completions."""
        futures = [
            sampling.sample(
                self.encode(question),
                self.options.samples,
                SamplingParams(max_tokens=MAX_TOKENS, stop=STOP, seed=rng.getrandbits(31)),
            )
            for question in batch
        ]
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

    def evaluate(self, sampling: SamplingClient) -> Evaluation:
        """Score questions that are never trained on."""
        results = self.sample(sampling, HELD_OUT, random.Random(self.options.seed))
        scores = [self.score(question, result) for question, result in zip(HELD_OUT, results, strict=True)]
        texts = [self.tokenizer.decode(result.sequences[0].tokens, skip_special_tokens=True) for result in results]
        answers = [
            f"{str(text).strip()!r} ({sum(one):.0f} of {len(one)} right)"
            for text, one in zip(texts, scores, strict=True)
        ]
        return Evaluation(float(np.mean(scores)), answers[: len(SHOWN)])

    def encode(self, question: Question) -> list[int]:
        """Return the prompt's token ids."""
        tokens: list[int] = self.tokenizer.encode(question.prompt, add_special_tokens=False)
        return tokens


def describe(report: StepReport, steps: int) -> str:
    """Describe a step in a line."""
    return (
        f"step {report.step} of {steps}: reward {report.reward:.2f}, version {report.version}, {report.seconds:.1f} s"
    )


def show(console: Console, reports: list[StepReport], before: Evaluation, after: Evaluation, out: Path) -> None:
    """Print the table, draw the curve, save the numbers."""
    if not reports:  # no step was taken, or their reports were removed
        console.print(f"on countries never trained on: before {before.score:.3f}, after {after.score:.3f}")
        return
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
    console.print(f"on countries never trained on: before {before.score:.3f}, after {after.score:.3f}")
    console.print(f"publish: p50 {publish[0]:.1f} ms, p99 {publish[1]:.1f} ms")
    rates = {"first_quarter": first, "last_quarter": last, "held_out": [before.score, after.score]}
    write(out / "rewards.json", {**rates, "steps": [asdict(report) for report in reports]})
    console.print(f"reward curve: {draw_curve(reports, before.score, after.score, out / 'reward.png')}")


def draw_curve(reports: list[StepReport], before: float, after: float, path: Path) -> Path:
    """Draw reward over steps, with its moving mean; and what is held out, before the first step and after the last."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed once

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    steps, rewards = [report.step for report in reports], [report.reward for report in reports]
    window = max(1, len(rewards) // 6)
    means = [np.mean(rewards[max(0, index - window + 1) : index + 1]) for index in range(len(rewards))]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    axes.plot(steps, rewards, "o", color="#9db8d9", markersize=4, label="each step")
    axes.plot(steps, means, color="#1f4e8c", linewidth=2, label=f"mean of {window} steps")
    axes.plot([0, steps[-1]], [before, after], "D--", color="#c2410c", linewidth=1, label="countries never trained on")
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
    parser.add_argument("--seed", type=int, default=0, help="of the adapter, the prompts and the samples")
    parser.add_argument(
        "--name", default=argparse.SUPPRESS, help="of the run; one that exists is continued (default: by rank and seed)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory of the curve and the numbers")
    options = parser.parse_args()
    options.name = getattr(options, "name", f"rl_loop, rank {options.rank}, seed {options.seed}")
    options.settings = (
        f"rank {options.rank}, seed {options.seed}, {options.prompts} prompts, {options.samples} samples, "
        f"learning rate {options.learning_rate}"
    )
    return options


if __name__ == "__main__":
    main()

"""Reinforcement learning on a task: prompts, and a function that says how good a completion is.

A step publishes the weights, samples a group of completions for each of a few prompts, and turns rewards into
advantages as GRPO does (arXiv 2402.03300): minus the group's mean, divided by its deviation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console

from paceline import AdamParams, Datum, Rollout, SamplingClient, SamplingParams, ServiceClient
from paceline.client.training_client import LossName
from paceline.recipes.data import digest, repeatable
from paceline.recipes.loop import Loop, Taken
from paceline.recipes.options import TrainingOptions, option
from paceline.recipes.runs import open_run
from paceline.recipes.tasks import Prompt, Prompts, Scored, load_task

MOST_BATCHES = 8
"""Batches to sample for a step, until the rewards of a group differ."""
LOSSES: tuple[LossName, ...] = ("importance_sampling", "ppo", "cispo")
_SHOWN = 4000
"""Characters of a prompt and of a completion that are kept of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlOptions(TrainingOptions):
    """Options of `paceline rl`."""

    task: Path = field(metadata={"help": "Python file with PROMPTS and reward(prompt, completion)", "argument": "TASK"})
    learning_rate: float = option(1e-4, "learning rate of AdamW, after the warmup")
    steps: int = option(100, "optimizer steps", minimum=1)
    batch: int = option(8, "prompts in a step", minimum=1)
    group: int = option(8, "completions of each prompt", minimum=2)
    loss: LossName = field(default="importance_sampling", metadata={"help": "loss", "choices": LOSSES})
    max_tokens: int = option(256, "most tokens of a completion", minimum=1)
    temperature: float = option(1.0, "of the samples that are trained on; evaluations are greedy")


def rl(service: ServiceClient, options: RlOptions, console: Console) -> None:
    """Train on the task of a file. Raises BadTask before anything is trained, CannotContinue, PacelineError."""
    task = load_task(options.task)
    tokenizer = service.create_sampling_client(base_model=options.base_model).get_tokenizer()
    prompts = Prompts(tokenizer, task)
    name = options.name or f"rl {options.task.stem}"
    console.print(
        f"{len(task.prompts)} prompts, {len(task.evaluation)} held out, {options.steps} steps", highlight=False
    )
    training = open_run(service, options, name, {"recipe": "rl", "task": digest(options.task)}, console.print)

    def take_step(done: int, rate: float) -> Taken | None:
        drawn, seeds = _endless(task.prompts, f"{options.seed} step {done}"), repeatable(f"{options.seed} {done}")
        sampling = training.save_weights_and_get_sampling_client()
        scored = list[Scored]()
        for _ in range(MOST_BATCHES):
            batch = sample(sampling, list(islice(drawn, options.batch)), seeds.getrandbits(31))
            scored += batch
            data = [datum for one in batch for datum in _data(prompts.encode(one.prompt), one)]
            if data:
                break
        else:
            console.print(f"nothing is left to learn: in {MOST_BATCHES} batches all rewards of a group were equal")
            return None
        # Both are issued before either is awaited, so the trainer does not pause between them.
        passed = training.forward_backward(data, options.loss)
        update = training.optim_step(AdamParams(learning_rate=rate), only_if_succeeded=passed)
        rollouts = [Rollout(prompts.text(one.prompt)[-_SHOWN:], text[:_SHOWN], float(reward))
                    for one in scored for text, reward in zip(one.texts, one.rewards, strict=True)]  # fmt: skip
        training.log_rollouts(rollouts, done + 1)
        rewards = np.concatenate([one.rewards for one in scored])
        lengths = [len(sequence.tokens) for one in scored for sequence in one.result.sequences]
        values = {
            "reward": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "completion_tokens": float(np.mean(lengths)),
            "groups_used": float(np.mean([bool(one.advantages.any()) for one in scored])),
        }
        output = passed.result()
        return Taken(update.result(), output.metrics["loss:sum"] / output.metrics["tokens:sum"], values)

    def sample(
        sampling: SamplingClient,
        batch: Sequence[Prompt],
        seed: int,
        count: int = options.group,
        *,
        greedy: bool = False,
    ) -> list[Scored]:
        """Sample completions of each prompt, all concurrently, and score them."""
        temperature = 0.0 if greedy else options.temperature
        futures = [
            sampling.sample(
                prompts.encode(prompt),
                count,
                SamplingParams(
                    max_tokens=options.max_tokens, temperature=temperature, stop=task.stop, seed=seed + index
                ),
            )
            for index, prompt in enumerate(batch)
        ]
        return [prompts.score(prompt, future.result()) for prompt, future in zip(batch, futures, strict=True)]

    def evaluate() -> dict[str, float]:
        sampling = training.save_weights_and_get_sampling_client()
        scored = sample(sampling, task.evaluation, options.seed, 1, greedy=True)
        return {"reward": float(np.mean([one.rewards for one in scored]))}

    loop = Loop(service, training, options, options.steps, console, name)
    loop.run(take_step, evaluate if task.evaluation else None)


def _endless(prompts: Sequence[Prompt], seed: str) -> Iterator[Prompt]:
    """Yield the prompts, each once before any comes again, in an order that depends on the seed."""
    order = repeatable(seed)
    while True:
        yield from order.sample(prompts, len(prompts))


def _data(prompt: Sequence[int], scored: Scored) -> list[Datum]:
    """Return a datum for each completion of a group; none if its rewards are equal, which teach nothing."""
    if not scored.advantages.any():
        return []
    return [
        Datum.from_completion(prompt, sequence.tokens, logprobs=sequence.logprobs, advantages=advantage)
        for sequence, advantage in zip(scored.result.sequences, scored.advantages, strict=True)
    ]

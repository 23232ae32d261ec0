r"""Tasks of reinforcement learning: a Python file with prompts and a reward.

    PROMPTS = [{"prompt": "Country: Peru\nCapital:", "answer": "Lima"}]  # or a function that returns them

    def reward(prompt, completion):
        return float(completion.strip() == prompt["answer"])

A prompt is a text, a list of messages, or a dict whose `prompt` is one of these; the reward gets it as it is. A file
may also have EVAL, prompts that are only evaluated on; SYSTEM, a system message, with which prompts of text become
messages of a user; and STOP, texts that end a completion and are not in it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline import SampledSequence, SampleResult, errors
from paceline.chat.messages import read_messages
from paceline.types.training import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]] | Mapping[str, Any]


class BadTask(ValueError):
    """A file is no task. The message is one sentence: what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a file says."""

    prompts: Sequence[Prompt]
    reward: Callable[[Any, str], float]
    evaluation: Sequence[Prompt] = ()
    system: str | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """A group: the completions of a prompt, with their rewards."""

    prompt: Prompt
    result: SampleResult
    texts: Sequence[str]
    rewards: Array
    """float64, shape [completions]."""

    @property
    def advantages(self) -> Array:
        """Rewards minus their mean, divided by their deviation: float64, shape [completions]; 0 if all are equal."""
        centred = self.rewards - self.rewards.mean()
        deviation = self.rewards.std()
        return centred / deviation if deviation > 1e-6 else np.zeros_like(centred)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Turns prompts of a task into tokens, and completions into rewards."""

    tokenizer: PreTrainedTokenizerBase
    task: Task

    def text(self, prompt: Prompt) -> str:
        """Return a prompt as the model reads it: a text as it is, messages by the chat template."""
        content = _content(prompt)
        if isinstance(content, str):
            if self.task.system is None:
                return content
            content = [{"role": "user", "content": content}]
        if self.task.system:
            content = [{"role": "system", "content": self.task.system}, *content]
        return str(self.tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids. A chat template writes the special tokens itself."""
        is_text = isinstance(_content(prompt), str) and self.task.system is None
        tokens: list[int] = self.tokenizer.encode(self.text(prompt), add_special_tokens=is_text)
        return tokens

    def score(self, prompt: Prompt, result: SampleResult) -> Scored:
        """Reward completions. Raises BadTask for a reward that is no finite number."""
        texts = [self._text_of(one) for one in result.sequences]
        rewards = np.array([self._reward(prompt, text) for text in texts])
        return Scored(prompt, result, texts, rewards)

    def _text_of(self, sequence: SampledSequence) -> str:
        """Return a completion's text up to where a text of STOP begins, which its tokens keep."""
        text = str(self.tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        return text[: min([text.find(stop) for stop in self.task.stop if stop in text], default=len(text))]

    def _reward(self, prompt: Prompt, text: str) -> float:
        given = self.task.reward(prompt, text)
        try:
            number = float(given)
        except (TypeError, ValueError) as error:
            raise BadTask(f"reward returned {given!r}; return a number") from error
        if not np.isfinite(number):
            raise BadTask(f"reward returned {given!r}; return a finite number")
        return number


def load_task(path: Path) -> Task:
    """Run a file and return its task. Raises BadTask, OSError, and what the file raises."""
    path.read_bytes()  # an OSError names the file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadTask(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    reward = getattr(module, "reward", None)
    if not callable(reward):
        raise BadTask(f"{path} has no function reward(prompt, completion)")
    prompts = _prompts(path, "PROMPTS", getattr(module, "PROMPTS", None))
    if not prompts:
        raise BadTask(f"{path} has no PROMPTS; give a list, or a function that returns one")
    stop = getattr(module, "STOP", ())
    return Task(
        prompts,
        reward,
        _prompts(path, "EVAL", getattr(module, "EVAL", ())),
        getattr(module, "SYSTEM", None),
        (stop,) if isinstance(stop, str) else tuple(stop),
    )


def _prompts(path: Path, name: str, given: Any) -> list[Prompt]:
    prompts = list((given() if callable(given) else given) or ())
    for index, prompt in enumerate(prompts):
        content = _content(prompt)
        try:
            if not isinstance(content, str):
                read_messages(content)
        except errors.PacelineError as error:
            raise BadTask(f"{path}: {name}[{index}] is neither a text nor a list of messages: {error}") from error
        if not content:
            raise BadTask(f"{path}: {name}[{index}] is empty")
    return prompts


def _content(prompt: Prompt) -> Any:
    return prompt.get("prompt") if isinstance(prompt, Mapping) else prompt

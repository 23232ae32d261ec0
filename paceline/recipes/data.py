"""Rows of a file: read, checked, split, and dealt out in batches."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline import Datum, ServiceClient, errors
from paceline.chat.messages import read_messages

T = TypeVar("T")
_MOST_NAMED = 10
_CONVERSATION = re.compile(r"conversations\[(\d+)\]\.?")


class BadRows(ValueError):
    """Rows of a file that cannot be trained on. The message has a line for each: file, line, field, why."""


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """What a line of a file says."""

    place: str
    """File and number of the line, from 1."""
    value: T


def read_rows(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> list[Row[T]]:
    """Return the rows of a JSON Lines file, without empty lines. `parse` raises PacelineError for a bad row.

    Raises BadRows, OSError.
    """
    rows, bad = list[Row[T]](), list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            read = json.loads(line)
            if not isinstance(read, dict):
                raise errors.InvalidArgument.must_be("an object", "row")
            rows.append(Row(place, parse(read)))
        except json.JSONDecodeError as error:
            bad.append(f"{place}: is not JSON: {error}")
        except errors.PacelineError as error:
            bad.append(f"{place}: {error}")
    if bad:
        more = [f"and {len(bad) - _MOST_NAMED} more"] if len(bad) > _MOST_NAMED else []
        raise BadRows("\n".join([*bad[:_MOST_NAMED], *more]))
    if not rows:
        raise BadRows(f"{path}: has no rows")
    return rows


def repeatable(seed: str) -> random.Random:
    """Return random numbers that depend on a text alone."""
    return random.Random(seed)  # noqa: S311 - no secrets


def hold_out(rows: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Split rows into those to train on and a share that is held out, at least one; both in the file's order."""
    count = min(max(1, round(share * len(rows))), len(rows) - 1) if share else 0
    held = frozenset(repeatable(f"{seed} held out").sample(range(len(rows)), count))
    return (
        [row for index, row in enumerate(rows) if index not in held],
        [row for index, row in enumerate(rows) if index in held],
    )


def read_split(
    path: Path, evaluation: str, seed: int, parse: Callable[[Mapping[str, Any]], T]
) -> tuple[list[Row[T]], list[Row[T]]]:
    """Return the rows to train on and those to evaluate on: a share that is held out, or those of another file.

    Raises BadRows, OSError, ValueError for a share that is not at least 0 and below 1.
    """
    rows = read_rows(path, parse)
    try:
        share = float(evaluation)
    except ValueError:
        return rows, read_rows(Path(evaluation), parse)
    if not 0 <= share < 1:
        raise ValueError(f"--eval is {evaluation}; give a share of at least 0 and below 1, or a file")
    return hold_out(rows, share, seed)


@dataclass(frozen=True, slots=True)
class Batches(Generic[T]):
    """Rows in a new order in each epoch. A batch depends on its number and the seed alone."""

    rows: Sequence[T]
    size: int
    seed: int

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has; the last may be smaller."""
        return -(-len(self.rows) // self.size)

    def batch(self, number: int) -> list[T]:
        """Return the batch of a number, from 0."""
        epoch, place = divmod(number, self.per_epoch)
        order = repeatable(f"{self.seed} epoch {epoch}").sample(range(len(self.rows)), len(self.rows))
        return [self.rows[index] for index in order[place * self.size : (place + 1) * self.size]]


def digest(path: Path) -> str:
    """Return what changes when the file does."""
    return sha256(path.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its completion, as they are: no chat template, and an end-of-sequence token at the end."""

    prompt: str
    completion: str


Conversation = dict[str, Any]
"""`messages`, and perhaps `tools` and `chat_template_kwargs`, as `render_conversations` takes them."""
Example = Text | Conversation


def conversation_of(row: Mapping[str, Any], messages: Any) -> Conversation:
    """Return a conversation with what else the row has for the template. Raises PacelineError."""
    read_messages([_without_weight(one) for one in messages] if isinstance(messages, list) else messages)
    extra = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name)}
    return {"messages": messages, **extra}


def example_of(row: Mapping[str, Any], completion: str) -> Example:
    """Return the example of a row with a `prompt` and, under the name `completion`, what follows: texts or messages.

    Of messages the prompt's are not trained on. Raises PacelineError.
    """
    for name in ("prompt", completion):
        if not row.get(name):
            raise errors.MissingField("is not set", field=name)
    prompt, answer = row["prompt"], row[completion]
    if isinstance(prompt, str) and isinstance(answer, str):
        return Text(prompt, answer)
    if not isinstance(prompt, list) or not isinstance(answer, list):
        message = "must be text where the prompt is text, and a list of messages where it is one"
        raise errors.InvalidArgument(message, field=completion)
    context = [{**one, "weight": 0} if isinstance(one, dict) and one.get("role") == "assistant" else one
               for one in prompt]  # fmt: skip
    return conversation_of(row, context + answer)


def _without_weight(message: Any) -> Any:
    """Return a message without the field that only training knows; the trainer checks it."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name != "weight"}


def render(service: ServiceClient, rows: Sequence[Row[Example]], base_model: str) -> list[list[Datum]]:
    """Return the data of each row, for cross_entropy. Raises BadRows for one that the model's template refuses."""
    data: list[list[Datum]] = [[] for _ in rows]
    chats = [(index, row.value) for index, row in enumerate(rows) if isinstance(row.value, dict)]
    try:
        rendered = service.render_conversations([chat for _, chat in chats], base_model) if chats else []
    except errors.PacelineError as error:
        if (number := _CONVERSATION.match(error.field)) is None:
            raise
        error.field = error.field[number.end() :]
        raise BadRows(f"{rows[chats[int(number[1])][0]].place}: {error}") from error
    for (index, _), found in zip(chats, rendered, strict=True):
        data[index] = found
    if len(chats) < len(rows):
        tokenizer = service.create_sampling_client(base_model=base_model).get_tokenizer()
        for index, row in enumerate(rows):
            if isinstance(row.value, Text):
                prompt = tokenizer.encode(row.value.prompt)
                completion = tokenizer.encode(row.value.completion, add_special_tokens=False)
                data[index] = [Datum.from_completion(prompt, [*completion, tokenizer.eos_token_id])]
    return data

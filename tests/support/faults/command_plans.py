"""Plans: a run's commands, and the faults that a client meets while it issues them. A plan is made from its seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from random import Random

from paceline import AdamParams, Datum, TrainingClient
from paceline.client import PacelineFuture
from support.faults.faulty_network import Cut, Fault
from support.models.tiny_models import VOCAB_SIZE

PART = 1024
"""Datums that the client sends in one command."""
SHORT_SECONDS = 0.5
"""How long a client with short timeouts waits for an answer."""


class Kind(Enum):
    """What a command is."""

    PASS = "pass"
    STEP = "step"
    SAVE = "save"
    PUBLISH = "publish"
    LOAD = "load"
    CUSTOM_LOSS = "custom loss"
    FORWARD = "forward"
    UNKNOWN_LOSS = "unknown loss"
    BAD_TOKEN = "bad token"
    FAILING_LOSS = "failing loss"
    LONG_PASS = "long pass"

    @property
    def changes_nothing(self) -> bool:
        """Whether the run is the same after it, also if it executes."""
        return self in {Kind.FORWARD, Kind.UNKNOWN_LOSS, Kind.BAD_TOKEN, Kind.FAILING_LOSS}


_SHARES = {
    Kind.PASS: 10,
    Kind.STEP: 6,
    Kind.SAVE: 3,
    Kind.PUBLISH: 3,
    Kind.LOAD: 3,
    Kind.CUSTOM_LOSS: 2,
    Kind.FORWARD: 2,
    Kind.UNKNOWN_LOSS: 1,
    Kind.BAD_TOKEN: 1,
    Kind.FAILING_LOSS: 1,
    Kind.LONG_PASS: 0.2,
}
"""How often each kind is drawn."""
_UNANSWERED = (Fault.UNANSWERED, Fault.BROKEN, Fault.LEFT, Fault.LATE)
_FINAL = (Fault.DENIED, Fault.TOO_LARGE)
"""Refusals after which a client does not send a call again."""


@dataclass(frozen=True)
class Act:
    """A call of a training client."""

    kind: Kind
    number: int
    """Its place in the plan, from which its data is made."""
    of: str = ""
    """Name of the checkpoint that it loads."""
    flag: bool = False
    """`with_optimizer` of a load, `durable` of a publish."""
    part: int | None = None
    """Only this part of a long pass."""

    def issue(self, training: TrainingClient) -> PacelineFuture:
        """Issue it."""
        match self.kind:
            case Kind.STEP:
                return training.optim_step(AdamParams(learning_rate=1e-2))
            case Kind.SAVE:
                return training.save_state(f"checkpoint-{self.number}")
            case Kind.PUBLISH:
                return training.publish_weights(durable=self.flag, wait_for="none")
            case Kind.LOAD:
                load = training.load_state_with_optimizer if self.flag else training.load_state
                return load(f"paceline://{training.run_id}/state/{self.of}")
        return self._issue_pass(training)

    def _issue_pass(self, training: TrainingClient) -> PacelineFuture:
        match self.kind:
            case Kind.FORWARD:
                return training.forward(self.data())
            case Kind.CUSTOM_LOSS:
                return training.forward_backward_custom(self.data(), _squares)
            case Kind.FAILING_LOSS:
                return training.forward_backward_custom(self.data(), _fail)
            case Kind.UNKNOWN_LOSS:
                return training.forward_backward(self.data(), "no_such_loss")
            case Kind.BAD_TOKEN:
                return training.forward_backward([Datum.from_completion([1, 2], [VOCAB_SIZE])])
        return training.forward_backward(self.data())

    def data(self) -> list[Datum]:
        """Return its batch."""
        random = Random(self.number)
        if self.kind is not Kind.LONG_PASS:
            return [_datum(random, random.randint(2, 6)) for _ in range(random.randint(1, 3))]
        whole = [_datum(random, 1) for _ in range(PART + 2)]
        return whole if self.part is None else (whole[:PART], whole[PART:])[self.part]


@dataclass(frozen=True)
class Burst:
    """Forward passes that several threads issue at the same time."""

    threads: tuple[tuple[Act, ...], ...]


@dataclass(frozen=True)
class Chunk:
    """Commands that are issued one after the other, without waiting for answers. Then all answers are awaited."""

    items: tuple[Act | Burst, ...]
    threads: int
    """How many threads issue them."""
    keeps_client: bool
    """Whether the client goes on with the next chunk even if the fate of a command of this one is unknown."""


@dataclass(frozen=True)
class Plan:
    """Everything that is drawn from a seed."""

    seed: int
    budget: float
    """The client's RetryPolicy.budget."""
    is_short: bool
    """Whether the client has short timeouts."""
    chunks: tuple[Chunk, ...]
    faults: dict[int, tuple[Fault, ...]] = field(default_factory=dict)
    """By number of the call, one for each time that it arrives."""
    cuts: tuple[Cut, ...] = ()


def make_plan(seed: int) -> Plan:
    """Make the plan of a seed."""
    random = Random(seed)
    is_short = random.random() < 0.15
    budget = random.choice((0.0, 0.1)) if is_short else random.choice((0.0, 0.0, 0.1, 0.8, 0.8))
    chunks, saved, number = [], ["absent"], 0
    for _ in range(random.randint(2, 3)):
        items: list[Act | Burst] = []
        for _ in range(random.randint(3, 6)):
            number += 1
            if random.random() < 0.07:
                forwards = [tuple(Act(Kind.FORWARD, 100 * number + 10 * i + j) for j in range(2)) for i in range(2)]
                items.append(Burst(tuple(forwards)))
                continue
            act = _make_act(random, number, saved)
            items.append(act)
            if act.kind is Kind.SAVE:
                saved.append(f"checkpoint-{number}")
        chunks.append(Chunk(tuple(items), random.choice((1, 1, 3)), random.random() < 0.4))
    # Few kinds in one plan, so that their sequences differ between plans.
    kinds = random.sample([one for one in Fault if one is not Fault.SILENT], random.randint(1, 5))
    kinds += [Fault.SILENT] * is_short + [Fault.LOST] * (budget == 0)
    share = random.uniform(0.15, 0.6)
    faults = {call: _draw_faults(random, kinds) for call in range(1, 3 * number) if random.random() < share}
    cuts = [
        Cut(random.random() < 0.5, random.randint(1, 3000), random.choice((0, 0, 1, 3)))
        for _ in range(random.choice((0, 0, 1, 2)))
    ]
    return Plan(seed, budget, is_short, tuple(chunks), faults, tuple(cuts))


def _draw_faults(random: Random, kinds: list[Fault]) -> tuple[Fault, ...]:
    """Draw the faults of one call. What is hardest to tell is a call that is refused after its answer was lost."""
    if random.random() < 0.3:
        return random.choice(_UNANSWERED), random.choice(_FINAL)
    return tuple(random.choices(kinds, k=random.choice((1, 1, 2, 3))))


def _make_act(random: Random, number: int, saved: list[str]) -> Act:
    (kind,) = random.choices(list(_SHARES), list(_SHARES.values()))
    return Act(kind, number, random.choice(saved), random.random() < 0.5)


def _datum(random: Random, length: int) -> Datum:
    tokens = [random.randrange(VOCAB_SIZE) for _ in range(length + 1)]
    return Datum.from_completion(tokens[:1], tokens[1:])


def _squares(_: object, logprobs: list) -> tuple:
    return sum((row**2).sum() for row in logprobs), {"one:sum": 1.0}


def _fail(_: object, __: object) -> tuple:
    raise ValueError("the loss fails")

"""Run plans, and compare each with an undisturbed run of the commands that executed.

What a client tells of a command is its answer, or an error that says that it did not execute, or that this is unknown.
Of those that are unknown, a client may leave out only the last: no command executes after one that did not arrive. So
few sequences of commands can have executed. In one of them an undisturbed run gives the same answers and ends with the
same weights, optimizer and gradient, bit for bit; if there is none, the client broke its word.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar
from zlib import crc32

from paceline import (
    Checkpoint,
    ForwardBackwardOutput,
    OptimStepOutput,
    PublishResult,
    RetryPolicy,
    Run,
    ServiceClient,
    Timeouts,
    TrainingClient,
    errors,
)
from support.faults.command_plans import SHORT_SECONDS, Act, Burst, Chunk, Kind, Plan, make_plan
from support.faults.faulty_network import FaultyNetwork
from support.patience import PATIENCE
from support.stacks.warm_trainer import WarmTrainer

SETTINGS = {"gap_wait_seconds": 0.15, "max_runs_per_tenant": 1000}
_CLOSING = (Act(Kind.PASS, 1001), Act(Kind.STEP, 1002), Act(Kind.SAVE, 1003))
"""Commands after a plan: their answers tell the run's gradient, weights and, by the weights afterwards, optimizer."""
T = TypeVar("T")


def fate_of(outcome: object) -> errors.Fate:
    """Return what an answer or error says of its command."""
    return outcome.fate if isinstance(outcome, errors.PacelineError) else errors.Fate.ANSWERED


@dataclass(frozen=True)
class Issued:
    """An issued command and its answer or error."""

    act: Act
    client: int
    """Number of the client that issued it."""
    outcome: object

    @property
    def fate(self) -> errors.Fate:
        return fate_of(self.outcome)


@dataclass
class Outcome:
    """What a plan came to."""

    plan: Plan
    commands: int
    fates: Counter[errors.Fate]
    clients: int
    struck: Counter[str]
    differences: list[str]
    """What the client broke; empty if it kept its word."""
    history: list[str] = field(default_factory=list)
    """Its commands, with what was told of them."""


@contextmanager
def trainer_for_plans(directory: Path) -> Iterator[WarmTrainer]:
    """Run a trainer on a tiny model until the block ends."""
    trainer = WarmTrainer(directory)
    try:
        assert trainer.start(**SETTINGS), trainer.text()
        yield trainer
    finally:
        trainer.kill()
        trainer.close()


class FaultRun:
    """Runs plans on a trainer."""

    def __init__(self, trainer: WarmTrainer) -> None:
        self._port = trainer.port

    async def run_all(self, seeds: range, at_once: int = 6) -> list[Outcome]:
        """Run the plans of these seeds, a few at the same time, each on runs of its own."""
        places = asyncio.Semaphore(at_once)

        async def run(seed: int) -> Outcome:
            async with places:
                return await self.run(make_plan(seed))

        with ThreadPoolExecutor(at_once) as self._threads:
            return await asyncio.gather(*map(run, seeds))

    async def run(self, plan: Plan) -> Outcome:
        """Run a plan, and find an undisturbed run that is the same."""
        async with FaultyNetwork(self._port).running() as network:
            loop = asyncio.get_running_loop()
            with ServiceClient(f"127.0.0.1:{self._port}") as calm:
                disturbed = _Disturbed(plan, network, calm, loop)
                await loop.run_in_executor(self._threads, disturbed.run)
                differences = disturbed.found or await loop.run_in_executor(self._threads, disturbed.compare)
                await calm.delete_run_async(disturbed.run_id, delete_checkpoints=True)
        return Outcome(
            plan,
            len(disturbed.issued),
            Counter(one.fate for one in disturbed.issued),
            disturbed.clients,
            network.struck,
            differences,
            [f"client {one.client}: {one.act}: {_said(one.outcome, disturbed.run_id)}" for one in disturbed.issued],
        )


class _Disturbed:
    """A run of a plan's commands through the network, on a thread of its own."""

    def __init__(
        self, plan: Plan, network: FaultyNetwork, calm: ServiceClient, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.plan = plan
        self.issued: list[Issued] = []
        self.found: list[str] = []
        self.clients = 0
        self.run_id = ""
        self.closing: list[object] = []
        self._is_attach_lost = False
        """Whether an AttachRun failed. It may arrive late, and supersedes the client that attached meanwhile."""
        self._network, self._calm, self._loop = network, calm, loop

    def run(self) -> None:
        """Issue the plan's commands, then the closing ones."""
        plan = self.plan
        limits = {"training": SHORT_SECONDS, "query": SHORT_SECONDS} if plan.is_short else {}
        retry = RetryPolicy(plan.budget, first_delay=0.005, max_delay=0.02)
        self.run_id = _create(self._calm).run_id
        address = f"127.0.0.1:{self._network.port}"
        with ServiceClient(address, retry=retry, timeouts=Timeouts(**limits, close=10.0)) as service:
            training = self._attach(service)
            self._on_loop(self._network.fail(plan.faults, plan.cuts))
            for chunk in plan.chunks:
                self._issue_all(training, chunk)
                if self._is_superseded or (self._is_in_doubt and not chunk.keeps_client):
                    training = self._attach(service)
            self._on_loop(self._network.calm())
            if plan.is_short:
                training = self._attach(self._calm)
            elif self._is_in_doubt or self._is_attach_lost:
                training = self._attach(service)
            else:  # the connection may just be made again
                self._patiently(lambda: service.get_run(self.run_id))
            closing = [act.issue(training) for act in _CLOSING]
            self.closing = [self._answer(act, future) for act, future in zip(_CLOSING, closing, strict=True)]
        for act, outcome in zip(_CLOSING, self.closing, strict=True):
            if isinstance(outcome, BaseException):
                self.found.append(f"the run does not go on: {act.kind.value}: {outcome!r}")

    def compare(self) -> list[str]:
        """Return no difference if an undisturbed run of commands that may have executed is the same.

        Otherwise return those from the run of all that may have.
        """
        known = [one for one in self.issued if one.fate is errors.Fate.ANSWERED]
        expected = [(one.act, _said(one.outcome, self.run_id)) for one in known]
        closing = [_said(outcome, self.run_id) for outcome in self.closing]
        info = _summary(self._calm.get_run(self.run_id))
        first: list[str] | None = None
        sequences = list(dict.fromkeys(possible_sequences(self.issued)))
        if not sequences:
            return ["a command executed in the place of one before it that did not"]
        for acts in sequences:
            training = _create(self._calm)
            futures = [(act, act.issue(training)) for act in (*acts, *_CLOSING)]
            said = {act: _said(_outcome(future), training.run_id) for act, future in futures}
            found = [
                f"{act.kind.value} {act.number} was answered {answer}, and undisturbed {said.get(act)}"
                for act, answer in [*expected, *zip(_CLOSING, closing, strict=True)]
                if said.get(act) != answer
            ]
            told = _summary(self._calm.get_run(training.run_id))
            if told != info:
                found.append(f"the run is {info}, and undisturbed {told}")
            self._calm.delete_run(training.run_id, delete_checkpoints=True)
            if not found:
                return []
            first = first or [f"no one of {len(sequences)} sequences is the same; in that of all commands:", *found]
        return first or []

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the fate of a command of the newest client is unknown."""
        return any(one.client == self.clients and one.fate is errors.Fate.UNKNOWN for one in self.issued)

    @property
    def _is_superseded(self) -> bool:
        """Whether the newest client is no longer the run's."""
        last = [one.outcome for one in self.issued if one.client == self.clients]
        return any(isinstance(outcome, errors.ClientSuperseded) for outcome in last)

    def _attach(self, service: ServiceClient) -> TrainingClient:
        def attach() -> TrainingClient:
            try:
                return service.get_training_client(self.run_id)
            except errors.PacelineError:
                self._is_attach_lost = True
                raise

        training = self._patiently(attach)
        self.clients += 1
        return training

    def _patiently(self, call: Callable[[], T]) -> T:
        deadline = monotonic() + PATIENCE
        while True:
            try:
                return call()
            except errors.PacelineError:
                if monotonic() > deadline:
                    raise
                sleep(0.01)

    def _issue_all(self, training: TrainingClient, chunk: Chunk) -> None:
        """Issue commands in order, each from the next thread that is free, and await their answers."""
        items, order, futures = iter(chunk.items), threading.Lock(), []

        def issue_some() -> None:
            while True:
                with order:
                    match next(items, None):
                        case None:
                            return
                        case Burst() as burst:
                            futures.extend(_issue_at_once(training, burst))
                        case Act() as act:
                            futures.append((act, act.issue(training)))

        _on_threads([issue_some] * chunk.threads)
        self.issued += [Issued(act, self.clients, self._answer(act, future)) for act, future in futures]

    def _answer(self, act: Act, future: object) -> object:
        outcome = _outcome(future)
        if isinstance(outcome, TimeoutError):
            self.found.append(f"{act.kind.value} {act.number} never ended")
        return outcome

    def _on_loop(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def possible_sequences(issued: list[Issued]) -> Iterator[tuple[Act, ...]]:
    """Yield the sequences of commands that may have executed, that of the most commands first."""
    clients: dict[int, list[Issued]] = {}
    for one in issued:
        clients.setdefault(one.client, []).append(one)
    for parts in product(*(list(_sequences_of(commands)) for commands in clients.values())):
        yield tuple(act for part in parts for act in part)


def _sequences_of(issued: list[Issued], *, is_missing: bool = False) -> Iterator[tuple[Act, ...]]:
    """Yield those of one client. With `is_missing`, a command before these did not execute and left its place free."""
    if not issued:
        yield ()
        return
    (one, *rest), executes, skips = issued, [], [(is_missing, ())]
    if one.fate is errors.Fate.ANSWERED:
        executes, skips = ([] if is_missing else [(False, (one.act,))]), []
    elif one.act.kind is Kind.LONG_PASS:  # its parts are commands of their own; the error is that of the first
        parts = [replace(one.act, part=part) for part in (0, 1)]
        executes = [] if is_missing else [(False, (parts[0],)), (False, (parts[1],))]
        if one.fate is errors.Fate.UNKNOWN and not is_missing:
            executes = [(False, tuple(parts)), *executes]
    elif one.fate is errors.Fate.UNKNOWN and not one.act.kind.changes_nothing:
        executes = [] if is_missing else [(False, (one.act,))]
        if one.act.kind is not Kind.CUSTOM_LOSS:  # of which only the first half may have executed
            skips = [(True, ())]
    for missing, acts in [*executes, *skips]:
        for others in _sequences_of(rest, is_missing=missing):
            yield (*acts, *others)


def _issue_at_once(training: TrainingClient, burst: Burst) -> list[tuple[Act, object]]:
    futures: list[tuple[Act, object]] = []
    start = threading.Barrier(len(burst.threads))

    def issue(acts: tuple[Act, ...]) -> None:
        start.wait()
        futures.extend((act, act.issue(training)) for act in acts)

    _on_threads([lambda acts=acts: issue(acts) for acts in burst.threads])
    return futures


def _on_threads(works: list[Callable[[], None]]) -> None:
    with ExitStack() as stack:
        for work in works:
            thread = threading.Thread(target=work)
            thread.start()
            stack.callback(thread.join)


def _create(calm: ServiceClient) -> TrainingClient:
    return calm.create_lora_training_client(rank=1, seed=7)


def _outcome(future) -> object:
    try:
        return future.result(PATIENCE)
    except Exception as error:
        return error


def _summary(run: Run) -> tuple:
    return run.step, run.latest_version, run.state.name, run.latest_state_checkpoint.rpartition("/")[2]


def _said(outcome: object, run_id: str) -> str:
    """Return what an outcome says, without times and the run's name."""
    match outcome:
        case ForwardBackwardOutput():
            logprobs = b"".join(output["logprobs"].tobytes() for output in outcome.loss_fn_outputs)
            said = f"log-probabilities {crc32(logprobs):x}, {sorted(outcome.metrics.items())}"
        case OptimStepOutput():
            said = f"step {outcome.step}, norm {outcome.grad_norm!r}, {outcome.tokens} tokens"
        case Checkpoint():
            said = f"{outcome.path}, step {outcome.step}, {outcome.sha256}"
        case PublishResult():
            said = f"version {outcome.model.version}, {outcome.model.blake3}"
        case Run():
            said = f"run at {_summary(outcome)}"
        case _:
            said = repr(outcome)
    return said.replace(run_id, "RUN")

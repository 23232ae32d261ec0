"""What goes into the next pass: tokens of the runs that were served least, so that no run waits for another's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from trainer_service.engine.microbatch.packing import PackedSegment


class Demand(Protocol):
    """A command that waits for passes."""

    @property
    def run_id(self) -> str:
        """Whose it is; no two demands are of one run."""
        ...

    @property
    def waiting(self) -> list[PackedSegment]:
        """What it may have in the next pass, longest first: a list that the scheduler takes from."""
        ...

    @property
    def forward_only(self) -> bool:
        """Whether no gradient is computed; a pass is of one kind."""
        ...

    @property
    def alone(self) -> bool:
        """Whether it shares its passes with no other."""
        ...


D = TypeVar("D", bound=Demand)


class Scheduler(Generic[D]):
    """Fair queueing by tokens (start-time fair queueing: Goyal et al., SIGCOMM 1996).

    Each run has a level, the tokens that it was served. The lowest goes first; one that comes begins no lower than the
    lowest of those that wait, so that idling earns nothing and a long command holds up nobody. What is in a pass
    depends on the demands and their order alone. The passes of a demand that nothing else waits beside are its
    segments, first fit by decreasing length. Passes that several ranks do at the same time are filled alike.
    """

    def __init__(self, pack_tokens: int, *, joint: bool = True, ranks: int = 1) -> None:
        """Take the tokens of a pass, a longer segment being one by itself, and whether runs share passes.

        `ranks` is how many passes are done at the same time.
        """
        self._pack_tokens = pack_tokens
        self._ranks = ranks
        self._joint = joint
        self._levels: dict[str, int] = {}
        self._waiting: set[str] = set()
        """Runs that waited for more when the last passes were full."""
        self._now = 0
        """The lowest level of those, or where all were served, the highest."""

    def next_passes(self, demands: Sequence[D]) -> list[list[tuple[D, list[PackedSegment]]]]:
        """Take each rank's next pass from the demands; all are empty when nothing waits, some when little does."""
        waiting = [demand for demand in demands if demand.waiting]
        if not waiting:
            return [[] for _ in range(self._ranks)]
        for demand in waiting:
            if demand.run_id not in self._waiting:
                self._levels[demand.run_id] = max(self._now, self._levels.get(demand.run_id, 0))
        first = min(waiting, key=self._level)
        taken = self._fill([each for each in waiting if each is first or self._may_join(each, first)])
        left = [demand for demand in waiting if demand.waiting]
        self._waiting = {demand.run_id for demand in left}
        self._now = min(map(self._level, left)) if left else max(map(self._level, waiting))
        return taken

    def forget(self, run_id: str) -> None:
        """Forget a run that is gone."""
        self._levels.pop(run_id, None)

    def _fill(self, sharing: list[D]) -> list[list[tuple[D, list[PackedSegment]]]]:
        queues = {demand.run_id: demand.waiting for demand in sharing}
        passes: list[dict[str, tuple[D, list[PackedSegment]]]] = [{} for _ in range(self._ranks)]
        rooms = [self._pack_tokens] * self._ranks
        while sharing:
            demand = min(sharing, key=self._level)
            queue = queues[demand.run_id]
            emptiest = max(range(self._ranks), key=rooms.__getitem__)
            taken, room = passes[emptiest], rooms[emptiest]
            # The first segment goes however long it is; none fits beside one that is longer than a pass.
            segment = next((each for each in queue if each.length <= room or not taken), None)
            if segment is None:
                sharing.remove(demand)
                continue
            queue.remove(segment)
            taken.setdefault(demand.run_id, (demand, []))[1].append(segment)
            self._levels[demand.run_id] += segment.length
            rooms[emptiest] -= segment.length
        return [list(taken.values()) for taken in passes]

    def _may_join(self, demand: D, first: D) -> bool:
        return self._joint and not demand.alone and not first.alone and demand.forward_only == first.forward_only

    def _level(self, demand: D) -> int:
        return self._levels[demand.run_id]

"""Fill the next pass with tokens of the runs that were served least, so that no run waits for another's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from trainer_service.engine.microbatch.job import PackedSegment


class Demand(Protocol):
    """A command that waits for passes."""

    run_id: str
    """The run that the command belongs to; a run has at most one demand."""
    waiting: list[list[PackedSegment]]
    """Segments that wait, longest first, in groups that share no pass. The scheduler removes those that it takes."""
    forward_only: bool
    """Whether no gradient is computed; equal for all demands in a pass."""
    alone: bool
    """Whether it shares no pass with other demands."""


D = TypeVar("D", bound=Demand)


class Scheduler(Generic[D]):
    """Fair queueing by tokens (start-time fair queueing: Goyal et al., SIGCOMM 1996).

    Each run has a level, the number of its tokens served. The lowest level goes first. A run that arrives starts no
    lower than the lowest waiting level, so idling earns no credit and a long command holds up no other run. The content
    of a pass depends only on the demands and their order. A demand that waits alone is packed first fit by decreasing
    length. Passes that several ranks run at the same time are filled evenly.
    """

    def __init__(self, pack_tokens: int, *, joint: bool = True, ranks: int = 1) -> None:
        """Create a scheduler for passes of `pack_tokens`, which runs share if `joint`.

        A segment longer than a pass is a pass of its own. `ranks` passes run at the same time.
        """
        self._pack_tokens = pack_tokens
        self._ranks = ranks
        self._joint = joint
        self._levels: dict[str, int] = {}
        self._waiting: set[str] = set()
        """Runs that still waited when the last passes were full."""
        self._now = 0
        """The lowest level of those runs or, if none was left waiting, the highest level that was served."""

    def next_passes(self, demands: Sequence[D]) -> list[list[tuple[D, list[PackedSegment]]]]:
        """Take each rank's next pass from the demands; all are empty if nothing waits, some if little does."""
        waiting = [demand for demand in demands if demand.waiting]
        if not waiting:
            return [[] for _ in range(self._ranks)]
        for demand in waiting:
            # Otherwise a run that was idle would go before all others until it had caught up with them.
            if demand.run_id not in self._waiting:
                self._levels[demand.run_id] = max(self._now, self._levels.get(demand.run_id, 0))
        first = min(waiting, key=self._level)
        taken = self._fill([each for each in waiting if each is first or self._may_join(each, first)])
        left = [demand for demand in waiting if demand.waiting]
        self._waiting = {demand.run_id for demand in left}
        self._now = min(map(self._level, left)) if left else max(map(self._level, waiting))
        return taken

    def forget(self, run_id: str) -> None:
        """Discard the level of a deleted run."""
        self._levels.pop(run_id, None)

    def _fill(self, sharing: list[D]) -> list[list[tuple[D, list[PackedSegment]]]]:
        queues = {demand.run_id: demand.waiting[0] for demand in sharing}
        passes: list[dict[str, tuple[D, list[PackedSegment]]]] = [{} for _ in range(self._ranks)]
        free_tokens = [self._pack_tokens] * self._ranks
        while sharing:
            demand = min(sharing, key=self._level)
            queue = queues[demand.run_id]
            emptiest = max(range(self._ranks), key=free_tokens.__getitem__)
            taken, free = passes[emptiest], free_tokens[emptiest]
            # The first segment is taken whatever its length; none fits beside one that is longer than a pass.
            segment = next((each for each in queue if each.length <= free or not taken), None)
            if segment is None:
                sharing.remove(demand)
                if not queue:
                    del demand.waiting[0]
                continue
            queue.remove(segment)
            taken.setdefault(demand.run_id, (demand, []))[1].append(segment)
            self._levels[demand.run_id] += segment.length
            free_tokens[emptiest] -= segment.length
        return [list(taken.values()) for taken in passes]

    def _may_join(self, demand: D, first: D) -> bool:
        return self._joint and not demand.alone and not first.alone and demand.forward_only == first.forward_only

    def _level(self, demand: D) -> int:
        return self._levels[demand.run_id]

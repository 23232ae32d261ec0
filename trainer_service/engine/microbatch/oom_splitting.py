"""Split a pass that does not fit into memory, and find how much of a single sequence would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import OutOfMemory
from trainer_service.engine.microbatch.microbatch import ForwardBackwardJob
from trainer_service.engine.microbatch.packing import PackedSegment
from trainer_service.engine.microbatch.runner import PassShare

Passes = Sequence[Sequence[PassShare]]
"""One pass for each rank, run at the same time; it may be empty for some ranks."""


def jobs_of(passes: Passes) -> list[ForwardBackwardJob]:
    """Return the distinct jobs that have a share."""
    return list({job.run_id: job for shares in passes for job, _ in shares}.values())


def smaller_passes(passes: Passes, *, out_of_memory: bool) -> list[Passes]:
    """Split failed passes: those of several runs by run, others into halves if they ran out of memory.

    Returns an empty list if nothing can be split.
    """
    jobs = jobs_of(passes)
    if len(jobs) > 1:
        return [[[share for share in shares if share[0] is job] for shares in passes] for job in jobs]
    counts = [len(segments) for shares in passes for _, segments in shares]
    if not out_of_memory or sum(counts) == 1:
        return []
    if max(counts) > 1:
        return [[_half(shares, second=second) for shares in passes] for second in (False, True)]
    return [_only(passes, rank, shares) for rank, shares in enumerate(passes) if shares]


def explain(passes: Passes, fits: Callable[[Passes], bool]) -> OutOfMemory:
    """Find by halving how many tokens of the only sequence, which does not fit, would fit; `fits` tries a part."""
    ((rank, (job, (segment,))),) = ((rank, share) for rank, shares in enumerate(passes) for share in shares)
    length = segment.length // 2
    while length and not fits(_only(passes, rank, [(job, [_first(segment, length)])])):
        length //= 2
    remedy = f"its first {length} would fit" if length else "nor would one token; free memory, or train less"
    return OutOfMemory(
        f"the sequence's {segment.length} tokens do not fit into the engine's memory; {remedy}.",
        field=f"data[{segment.index}]",
        metadata={"tokens": str(segment.length), "fitting_tokens": str(length)},
    )


def _only(passes: Passes, rank: int, shares: Sequence[PassShare]) -> Passes:
    """Return passes that are empty for all ranks but one."""
    return [shares if place == rank else [] for place in range(len(passes))]


def _half(shares: Sequence[PassShare], *, second: bool) -> Sequence[PassShare]:
    middles = [len(segments) // 2 for _, segments in shares]
    halves = [
        (job, segments[middle:] if second else segments[:middle])
        for (job, segments), middle in zip(shares, middles, strict=True)
    ]
    return [share for share in halves if share[1]]


def _first(segment: PackedSegment, length: int) -> PackedSegment:
    """Cut a segment after `length` tokens; if none of them counts, count the first token."""
    counted = segment.counted[segment.counted < length]
    return replace(segment, length=length, counted=counted if len(counted) else segment.counted[:1] * 0)

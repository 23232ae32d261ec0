"""What becomes of a pass that does not fit into memory: smaller ones, and for a sequence by itself what would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import OutOfMemory
from trainer_service.engine.microbatch.microbatch import ForwardBackwardJob
from trainer_service.engine.microbatch.packing import PackedSegment
from trainer_service.engine.microbatch.runner import PassShare

Passes = Sequence[Sequence[PassShare]]
"""One pass for each rank, done at the same time; of some ranks it may be empty."""


def jobs_of(passes: Passes) -> list[ForwardBackwardJob]:
    """Return the jobs that have a share, each once."""
    return list({job.run_id: job for shares in passes for job, _ in shares}.values())


def smaller_passes(passes: Passes, *, out_of_memory: bool) -> list[Passes]:
    """Split passes that failed: those of several runs into those of each, others into halves if memory was too little.

    Empty when there is nothing to split.
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
    """Find by halving how many tokens of the one sequence, which does not fit, would; `fits` tries a part of it."""
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
    """Return a pass for one rank and nothing for the others."""
    return [shares if place == rank else [] for place in range(len(passes))]


def _half(shares: Sequence[PassShare], *, second: bool) -> Sequence[PassShare]:
    middles = [len(segments) // 2 for _, segments in shares]
    halves = [
        (job, segments[middle:] if second else segments[:middle])
        for (job, segments), middle in zip(shares, middles, strict=True)
    ]
    return [share for share in halves if share[1]]


def _first(segment: PackedSegment, length: int) -> PackedSegment:
    """Cut a segment after `length` tokens, at least one of which counts."""
    counted = segment.counted[segment.counted < length]
    return replace(segment, length=length, counted=counted if len(counted) else segment.counted[:1] * 0)

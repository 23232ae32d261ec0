"""What becomes of a pass that does not fit into memory: smaller ones, and for a sequence by itself what would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import OutOfMemory
from trainer_service.engine.packing import Segment
from trainer_service.engine.passes import Share


def smaller_passes(shares: Sequence[Share], *, out_of_memory: bool) -> list[list[Share]]:
    """Split a pass that failed: one of several runs into one for each, another into halves if memory was too little.

    Empty when there is nothing to split.
    """
    if len(shares) > 1:
        return [[share] for share in shares]
    ((job, segments),) = shares
    middle = len(segments) // 2
    return [[(job, segments[:middle])], [(job, segments[middle:])]] if out_of_memory and middle else []


def explain(share: Share, fits: Callable[[Share], bool]) -> OutOfMemory:
    """Find by halving how many tokens of a sequence that does not fit would, and say so; `fits` tries a part of it."""
    job, (segment, *_) = share
    length = segment.length // 2
    while length and not fits((job, [_first(segment, length)])):
        length //= 2
    remedy = f"its first {length} would fit" if length else "nor would one token; free memory, or train less"
    return OutOfMemory(
        f"the sequence's {segment.length} tokens do not fit into the engine's memory; {remedy}.",
        field=f"data[{segment.index}]",
        metadata={"tokens": str(segment.length), "fitting_tokens": str(length)},
    )


def _first(segment: Segment, length: int) -> Segment:
    """Cut a segment after `length` tokens, at least one of which counts."""
    counted = segment.counted[segment.counted < length]
    return replace(segment, length=length, counted=counted if len(counted) else segment.counted[:1] * 0)

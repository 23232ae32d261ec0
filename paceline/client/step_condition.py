"""The condition of a step: that its passes succeeded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline import errors
from paceline.client.futures import IssuedCommand, PacelineFuture, command_of
from paceline.errors import Fate
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import ForwardBackwardOutput

Passes = PacelineFuture[ForwardBackwardOutput] | Iterable[PacelineFuture[ForwardBackwardOutput]]

_FIELD = "only_if_succeeded"
"""The argument's name."""
_WANTED = "a future that forward_backward returned, or a list of them"


def passes_of(given: Passes, order: object) -> list[IssuedCommand]:
    """Return the passes whose answers these futures are. Raises InvalidArgument, also for those of another order."""
    is_one = isinstance(given, PacelineFuture) or not isinstance(given, Iterable)
    futures: Sequence[object] = [given] if is_one else list(given)  # type: ignore[arg-type]
    passes = []
    for index, future in enumerate(futures):
        place = _FIELD if is_one else f"{_FIELD}[{index}]"
        issued = command_of(future)
        if not isinstance(future, PacelineFuture):
            raise errors.InvalidArgument.of_type(future, _WANTED, place)
        if issued is None or not issued.is_pass:
            raise errors.InvalidArgument(f"is the future of another call; give {_WANTED}", field=place)
        if issued.order is not order:
            raise errors.InvalidArgument(f"{issued.name} was issued by another TrainingClient", field=place)
        passes.append(issued)
    if not passes:
        raise errors.InvalidArgument(f"is empty; give {_WANTED}, or leave it out", field=_FIELD)
    return passes


def put_condition(request: pb.OptimStepRequest, passes: Sequence[IssuedCommand], partial: IssuedCommand | None) -> None:
    """Have the trainer refuse a step unless these passes succeeded. Call it when they have been sent.

    The trainer checks every pass from the first of these to the step. It cannot know of one that it does not have: with
    `partial`, the newest pass that it has not accepted whole, among them the step is refused here, with
    PrecedingRefused.
    """
    if partial is not None and partial.number >= min(issued.number for issued in passes):
        error = errors.PrecedingRefused(
            f"the trainer did not accept all of {partial.name}, or may not have, as its own error says; so the step "
            "was not sent. If other passes succeeded, their gradient waits: drop it with discard_gradient, or step "
            "without this condition",
            field=_FIELD,
        )
        error.fate = Fate.TURNED_AWAY
        raise error
    request.only_if_succeeded_since = min(issued.seq_ids[0] for issued in passes)


def _named_here(error: errors.PacelineError) -> errors.PacelineError:
    """Return the error of a step with the argument's name in place of the contract's."""
    if error.field != "only_if_succeeded_since":
        return error
    error.field = _FIELD
    if not isinstance(error, errors.OutOfRange):
        return error
    named = errors.OutOfRange(
        "too many commands lie between the first of these passes and the step; wait for the answers of the passes, and "
        "step without this condition",
        field=_FIELD,
    )
    named.fate = error.fate
    return named


def step_in(outcomes: Sequence[Any]) -> pb.OptimStepResponse:
    """Return the reply to a step. Raises its error."""
    (outcome,) = outcomes
    if isinstance(outcome, errors.PacelineError):
        raise _named_here(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    reply: pb.OptimStepResponse = outcome
    return reply

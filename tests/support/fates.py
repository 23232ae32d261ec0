"""Errors of stand-ins for the trainer, with the fates that a sender of commands gives them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from paceline import errors
from paceline.codec.commands import may_have_arrived

Reply = TypeVar("Reply")


async def with_fates(
    answer: Awaitable[Reply], answers: tuple[type[errors.PacelineError], ...] = (errors.InvalidArgument,)
) -> Reply:
    """Await a command's answer. Errors of the classes `answers` are the trainer's; others are those of the call."""
    try:
        return await answer
    except errors.PacelineError as error:
        unknown = errors.Fate.UNKNOWN if may_have_arrived(error) else errors.Fate.TURNED_AWAY
        error.fate = error.fate or (errors.Fate.ANSWERED if isinstance(error, answers) else unknown)
        raise


def turned_away(error: errors.PacelineError) -> errors.PacelineError:
    """Return an error as that of a command that the trainer does not have."""
    error.fate = errors.Fate.TURNED_AWAY
    return error

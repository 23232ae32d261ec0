"""Convert errors of the engine to messages."""

from __future__ import annotations

import logging

from paceline.errors import Internal, PacelineError
from trainer_service.engine import messages

_log = logging.getLogger(__name__)


def failure_of(error: Exception, doing: str) -> messages.Failure:
    """Convert an error. An unexpected one is logged, and the Failure carries its id."""
    if isinstance(error, PacelineError):
        return messages.Failure.of(error)
    unforeseen = Internal.unforeseen()
    _log.error("%s failed, error_id=%s", doing, unforeseen.error_id, exc_info=error)
    return messages.Failure.of(unforeseen)

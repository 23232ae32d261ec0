"""What went wrong in the engine, in a form that travels."""

from __future__ import annotations

import logging

from paceline.errors import Internal, PacelineError
from trainer_service.engine import messages

_log = logging.getLogger(__name__)


def failure_of(error: Exception, doing: str) -> messages.Failure:
    """Describe an error. One that nobody foresaw goes to the log, and its id into the Failure."""
    if isinstance(error, PacelineError):
        return messages.Failure.of(error)
    unforeseen = Internal.unforeseen()
    _log.error("%s failed, error_id=%s", doing, unforeseen.error_id, exc_info=error)
    return messages.Failure.of(unforeseen)

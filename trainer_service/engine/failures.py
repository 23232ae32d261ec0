"""What went wrong in the engine, in a form that travels."""

from __future__ import annotations

import logging
import uuid

from paceline.errors import Internal, PacelineError
from trainer_service.engine import messages

_log = logging.getLogger(__name__)


def failure_of(error: Exception, doing: str) -> messages.Failure:
    """Describe an error. One that nobody foresaw goes to the log, and its id into the Failure."""
    if isinstance(error, PacelineError):
        return messages.Failure.of(error)
    error_id = uuid.uuid4().hex
    _log.error("%s failed, error_id=%s", doing, error_id, exc_info=error)
    return messages.Failure.of(
        Internal("the engine failed; its log has the error_id.", metadata={"error_id": error_id}),
    )

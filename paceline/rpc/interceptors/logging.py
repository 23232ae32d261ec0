"""One log line per call, and a request id on every line logged during the call."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from uuid import uuid4

from structlog.contextvars import bound_contextvars

from paceline.log import get_logger
from paceline.rpc.identity import REQUEST_ID_KEY
from paceline.rpc.interceptors.around import AroundInterceptor, Call
from paceline.rpc.interceptors.outcome import outcome

_log = get_logger(__name__)
_MAX_RPC = 64
"""Most characters of a method's name that are logged, because a caller may send any name."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class LoggingInterceptor(AroundInterceptor):
    """Logs the method, code and milliseconds of every call."""

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        given = call.metadata(REQUEST_ID_KEY) or ""
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        start, code = perf_counter(), "OK"
        with bound_contextvars(request_id=request_id, rpc=call.method.rpartition("/")[2][:_MAX_RPC]):
            try:
                yield
            except BaseException as error:
                code = outcome(error, call)
                raise
            finally:
                log = _log.info if code in {"OK", "CANCELLED"} else _log.warning
                log("call", code=code, ms=round(1e3 * (perf_counter() - start), 2))

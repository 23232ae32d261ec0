"""Send errors as the catalog defines them, and any other exception as INTERNAL with an id, without its text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from paceline import errors
from paceline.log import get_logger
from paceline.rpc.interceptors.around import AroundInterceptor, Call
from paceline.rpc.status import abort

_log = get_logger(__name__)


class ErrorInterceptor(AroundInterceptor):
    """Converts exceptions to status codes with details."""

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        try:
            yield
        except errors.PacelineError as error:
            await abort(call.context, error)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:
            # A message could not be sent: the caller disconnected while the message was queued.
            raise asyncio.CancelledError from error
        except Exception:
            unforeseen = errors.Internal.unforeseen()
            _log.exception("uncaught", rpc=call.method, error_id=unforeseen.error_id)
            await abort(call.context, unforeseen)

"""The outcome of a call."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc

from paceline.rpc.interceptors.around import Call

_NAMES: dict[int, str] = {status.value[0]: status.name for status in grpc.StatusCode}


def outcome(error: BaseException, call: Call) -> str:
    """Return the name of the status code of a call that raised `error`."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED"
    code = cast("grpc.StatusCode | int | None", call.context.code())
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _NAMES.get(code or grpc.StatusCode.UNKNOWN.value[0], "UNKNOWN")

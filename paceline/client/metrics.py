"""What is measured of a run: logging, reading and watching it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, SupportsFloat
from uuid import uuid4

import grpc

from paceline import codec, errors
from paceline.client.futures import CommandOrder, IssuedCommand, PacelineFuture
from paceline.client.streams import Stream
from paceline.client.transport import Transport, read
from paceline.codec.metrics import metrics_row_from_proto, rollout_row_from_proto, rollout_to_proto
from paceline.layout import check_run_id
from paceline.metrics.v1 import metrics_service_pb2 as pb
from paceline.types.metrics import Metrics, MetricsRow, Rollout, RolloutRow
from paceline.types.training import as_names, is_iterable

_MOST_ROLLOUTS = 64
"""Most rollouts of one call."""
_PAGE_ROWS, _PAGE_ROLLOUTS = 10_000, 1_000
_RESUMED_AFTER = (errors.Unavailable, errors.TimedOut, errors.ReaderStalled)
"""Errors with which a watch may end that goes on with another call."""


class MetricsLog:
    """Logs values and rollouts of one run, in the order in which they are given; no command waits for them."""

    def __init__(self, transport: Transport, run_id: str) -> None:
        self._transport = transport
        self._run_id = run_id
        self._order = CommandOrder()
        self._turn = asyncio.Lock()
        self._numbers = count(1)

    def put_values(self, values: Mapping[str, SupportsFloat], step: int | None) -> PacelineFuture[int]:
        """Log values; the answer is the row's number. Raises InvalidArgument, OutOfRange."""
        if not isinstance(values, Mapping):
            raise errors.InvalidArgument.of_type(values, "a dict of numbers", "values")
        numbers = {name: _number(value, f"values[{name}]") for name, value in values.items()}
        return self._put([self._request(step, values=numbers)], lambda reply: reply.number)

    def put_rollouts(self, rollouts: Iterable[Rollout], step: int | None) -> PacelineFuture[int]:
        """Log rollouts; the answer is the number of the last. Raises InvalidArgument, OutOfRange, EmptyBatch."""
        if isinstance(rollouts, Rollout) or not is_iterable(rollouts):
            raise errors.InvalidArgument.of_type(rollouts, "a list of Rollout", "rollouts")
        messages = []
        for index, rollout in enumerate(rollouts):
            if not isinstance(rollout, Rollout):
                raise errors.InvalidArgument.of_type(rollout, "a Rollout", f"rollouts[{index}]")
            messages.append(rollout_to_proto(rollout))
        if not messages:
            raise errors.EmptyBatch("holds no rollout; give at least one", field="rollouts")
        starts = range(0, len(messages), _MOST_ROLLOUTS)
        requests = [self._request(step, rollouts=messages[start : start + _MOST_ROLLOUTS]) for start in starts]
        return self._put(requests, lambda reply: reply.rollout_number)

    def _request(self, step: int | None, **logged: Any) -> pb.LogMetricsRequest:
        return codec.make(pb.LogMetricsRequest, run_id=self._run_id, step=step, request_id=uuid4().hex, **logged)

    def _put(
        self, requests: Sequence[pb.LogMetricsRequest], decode: Callable[[pb.LogMetricsResponse], int]
    ) -> PacelineFuture[int]:
        # Closing the client waits for them as it does for commands: they are the last that a script does.
        number = next(self._numbers)
        issued = IssuedCommand(f"LogMetrics {number} of {self._run_id}", self._order, number)
        return self._transport.submit_command(issued, self._send(requests, decode))

    async def _send(
        self, requests: Sequence[pb.LogMetricsRequest], decode: Callable[[pb.LogMetricsResponse], int]
    ) -> int:
        async with self._turn:
            for request in requests:
                reply = await self._transport.call(self._transport.metrics.LogMetrics, request, "query")
        return decode(reply)


async def read_metrics(transport: Transport, run_id: str, names: Sequence[str], at_most_points: int | None) -> Metrics:
    """Return a run's rows, thinned evenly to `at_most_points` if given. Raises RunNotFound."""
    if at_most_points == 0:
        raise errors.OutOfRange("is 0; give 1 or more, or None for all rows", field="at_most_points")
    request = codec.make(
        pb.GetMetricsRequest,
        run_id=run_id,
        names=as_names(names, "names"),
        page_size=_PAGE_ROWS,
        at_most_points=0 if at_most_points is None else at_most_points,
    )
    rows: list[MetricsRow] = []
    while True:
        page = await transport.call(transport.metrics.GetMetrics, request, "query")
        rows += map(metrics_row_from_proto, page.rows)
        if not page.rows or request.at_most_points:
            return Metrics(rows)
        request.after = page.next_after


async def read_rollouts(transport: Transport, run_id: str, step: int | None, limit: int) -> list[RolloutRow]:
    """Return a run's newest rollouts, newest first. Raises RunNotFound."""
    request = codec.make(pb.GetRolloutsRequest, run_id=run_id, step=step, page_size=limit)
    rows: list[RolloutRow] = []
    while len(rows) < limit:
        request.page_size = min(limit - len(rows), _PAGE_ROLLOUTS)
        page = await transport.call(transport.metrics.GetRollouts, request, "query")
        if not page.rollouts:
            break
        rows += map(rollout_row_from_proto, page.rollouts)
        request.before = rows[-1].number
    return rows


class MetricsStream(Stream[MetricsRow]):
    """The rows of a run, each as it is written: iterate once, with `for` or `async for`.

    It goes on after lost connections and restarts of the services, without missing or repeating a row. Raises
    RunNotFound when the run is deleted. The request is sent at the first iteration and counts as a call in flight.
    Leaving the loop early ends it; use `with` or `async with` to end it also if an exception that left the loop is
    kept.
    """

    def __init__(self, transport: Transport, run_id: str, after: int) -> None:
        super().__init__(transport)
        self._request = codec.make(pb.WatchMetricsRequest, run_id=check_run_id(run_id), after=after)
        self._rows: deque[MetricsRow] = deque()

    async def _take(self) -> MetricsRow | None:
        while not self._rows:
            message = await self._read()
            if message is not None:
                self._rows.extend(map(metrics_row_from_proto, message.rows))
        row = self._rows.popleft()
        self._request.after = row.number
        return row

    async def _read(self) -> pb.WatchMetricsResponse | None:
        """Return the next message; None if the call ended, and another one has to go on."""
        if self._call is None:
            method = self._transport.metrics.WatchMetrics
            self._call, first = await self._transport.open_stream(method, self._request, "training")
            return first
        try:
            message = await read(self._call)
        except grpc.aio.AioRpcError as failure:
            error = self._transport.error(failure, self._request, "training")
            if not isinstance(error, _RESUMED_AFTER):
                raise error from failure
            message = None
        if message is None:
            call, self._call = self._call, None
            self._transport.end_stream(call)
        return message


def _number(value: SupportsFloat, field: str) -> float:
    if isinstance(value, str | bytes):
        raise errors.InvalidArgument.of_type(value, "a number", field)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise errors.InvalidArgument.of_type(value, "a number", field) from problem

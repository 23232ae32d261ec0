"""metrics.v1.MetricsService: each method decodes, calls the store and encodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import grpc

from paceline import errors
from paceline.log import get_logger
from paceline.metrics.v1 import metrics_service_pb2 as pb
from paceline.metrics.v1.metrics_service_pb2_grpc import MetricsServiceServicer
from paceline.rpc.identity import current_identity
from trainer_service import validation
from trainer_service.metrics.pages import RowPage, newest_rollouts, next_rollouts, next_rows, thinned_rows
from trainer_service.metrics.recorder import Recorder
from trainer_service.metrics.rows import StoredRollout
from trainer_service.metrics.store import MetricsStore, RunLogs
from trainer_service.rpc.metrics_messages import check_logged, rollout_to_proto, rollouts_of, row_of, rows_to_proto
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry

Context = grpc.aio.ServicerContext[Any, Any]

_REPEAT_SECONDS = 10.0
"""Longest silence of a stream: a reader that hears nothing for longer knows that the connection is dead."""

T = TypeVar("T")
_log = get_logger(__name__)


class MetricsServicer(MetricsServiceServicer):
    """RPCs for the metrics and rollouts of runs."""

    def __init__(self, registry: RunRegistry, store: MetricsStore, recorder: Recorder) -> None:
        self._registry = registry
        self._store = store
        self._recorder = recorder

    async def LogMetrics(self, request: pb.LogMetricsRequest, context: Context) -> pb.LogMetricsResponse:
        run = self._registry.get(request.run_id, current_identity())
        validation.check_request_id(request.request_id, "call")
        check_logged(request)
        await self._recorder.ready(run)
        step = request.step if request.HasField("step") else run.present_step
        row, rollouts = row_of(request, step), rollouts_of(request, step)
        try:
            number, rollout_number = await self._store.log(run, request.request_id, row, rollouts)
        except (OSError, errors.ChecksumMismatch) as error:
            raise _unavailable(run, error) from error
        return pb.LogMetricsResponse(number=number, rollout_number=rollout_number)

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        run = self._registry.get(request.run_id, current_identity())
        after, names = request.after, list(request.names)

        def read(logs: RunLogs) -> RowPage:
            if request.at_most_points:
                return thinned_rows(logs.rows, after, names, request.at_most_points)
            return next_rows(logs.rows, after, names, request.page_size)

        page = await self._read(run, read)
        return pb.GetMetricsResponse(rows=rows_to_proto(page.rows), next_after=page.next_after)

    async def WatchMetrics(
        self, request: pb.WatchMetricsRequest, context: Context
    ) -> AsyncIterator[pb.WatchMetricsResponse]:
        run = self._registry.get(request.run_id, current_identity())
        clock, after = asyncio.get_running_loop().time, request.after
        end = clock() + request.max_seconds if request.HasField("max_seconds") else None
        is_due = True  # the first message tells the caller that it watches
        with self._store.watching(run) as change:
            while True:
                self._store.check_watch(run)
                change.clear()
                page = await self._read(run, partial(_rows_after, after))
                if page.rows or is_due:
                    yield pb.WatchMetricsResponse(rows=rows_to_proto(page.rows))
                    is_due, after = False, page.next_after
                if page.rows:
                    continue
                left = _REPEAT_SECONDS if end is None else min(_REPEAT_SECONDS, end - clock())
                if left <= 0:
                    return
                try:
                    await asyncio.wait_for(change.wait(), left)
                except TimeoutError:
                    is_due = True

    async def GetRollouts(self, request: pb.GetRolloutsRequest, context: Context) -> pb.GetRolloutsResponse:
        run = self._registry.get(request.run_id, current_identity())
        step = request.step if request.HasField("step") else None

        def read(logs: RunLogs) -> list[StoredRollout]:
            if request.HasField("after"):
                return next_rollouts(logs.rollouts, request.after, step, request.page_size)
            return newest_rollouts(logs.rollouts, request.before, step, request.page_size)

        found = await self._read(run, read)
        return pb.GetRolloutsResponse(rollouts=map(rollout_to_proto, found))

    async def _read(self, run: RunRecord, read: Callable[[RunLogs], T]) -> T:
        """Read a run's files, with the rows of all steps that have ended. Raises EngineUnavailable."""
        await self._recorder.ready(run)
        try:
            return await self._store.read(run, read)
        except (OSError, errors.ChecksumMismatch) as error:
            raise _unavailable(run, error) from error


def _rows_after(after: int, logs: RunLogs) -> RowPage:
    return next_rows(logs.rows, after)


def _unavailable(run: RunRecord, error: Exception) -> errors.EngineUnavailable:
    """Return the error, which clients try again, of files that cannot be read or written at the moment."""
    _log.error("a run's metrics cannot be read or written", run=run.run_id, error=str(error))
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return errors.EngineUnavailable(f"the run's metrics cannot be read or written at the moment ({reason})")

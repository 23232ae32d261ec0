"""The connection to the trainer's WeightService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from paceline import errors
from paceline.codec import model_ref_to_proto
from paceline.log import get_logger
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.types import ModelRef
from paceline.weights import Part, fetch_version, read_parts
from paceline.weights.v1 import weight_service_pb2 as pb
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceStub
from sampler_service.transports.base import foreign

if TYPE_CHECKING:
    Watch = grpc.aio.StreamStreamCall[pb.WatchVersionsRequest, pb.WatchVersionsResponse]

_DESCRIBE_SECONDS = 5.0
"""Timeout for a manifest, which the trainer returns at once."""

_log = get_logger(__name__)


class TrainerLink:
    """Calls the trainer as a peer, for this sampler itself or for a tenant whose request needs a version."""

    def __init__(self, channel: grpc.aio.Channel, credential: str, fetch_timeout_seconds: float) -> None:
        self._stub = WeightServiceStub(channel)
        self._fetch_version = fetch_version(channel)
        self._credential = credential
        self._fetch_timeout = fetch_timeout_seconds

    def watch(self, messages: AsyncIterator[pb.WatchVersionsRequest]) -> Watch:
        """Open a watch that sends `messages`. Reading from it raises `grpc.aio.AioRpcError` when it breaks."""
        return self._stub.WatchVersions(messages, metadata=peer_metadata(self._credential))

    async def describe(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        """Return the manifest of what `ref` names now. Raises as `fetch`."""
        async with self.fetch(ref, tenant, seconds=_DESCRIBE_SECONDS) as (manifest, _):
            return manifest

    @asynccontextmanager
    async def fetch(
        self, ref: ModelRef, tenant: str, *, accept_staged_path: bool = False, seconds: float | None = None
    ) -> AsyncIterator[tuple[pb.Manifest, AsyncIterator[Part]]]:
        """Yield the manifest of a version or checkpoint, and its chunks or the path of its file in shared memory.

        Raises the trainer's error (NotFound, DataLoss, InvalidArgument), TrainerUnavailable for everything else.
        """
        request = pb.FetchVersionRequest(model=model_ref_to_proto(ref), accept_staged_path=accept_staged_path)
        metadata = peer_metadata(self._credential, tenant)
        call = self._fetch_version(request, metadata=metadata, timeout=seconds or self._fetch_timeout)
        try:
            parts = read_parts(call)
            first = await anext(parts, None)
            if not isinstance(first, pb.FetchVersionResponse) or first.WhichOneof("part") != "manifest":
                raise errors.ChecksumMismatch("the trainer's response does not begin with a manifest")
            yield first.manifest, parts
        except grpc.aio.AioRpcError as failure:
            raise _translate(failure, ref) from failure
        finally:
            # Abandoning a stream does not cancel it.
            call.cancel()


def _translate(failure: grpc.aio.AioRpcError, ref: ModelRef) -> errors.PacelineError:
    error = error_from_rpc(failure)
    if isinstance(error, errors.RunNotFound | errors.CheckpointNotFound):
        return foreign(ref)  # the same message as for loaded weights, so that callers cannot tell which are loaded
    if isinstance(error, errors.NotFound | errors.DataLoss | errors.InvalidArgument):
        return error
    _log.warning("trainer did not answer", code=failure.code().name, reason=error.reason)
    return errors.TrainerUnavailable("the trainer cannot be reached or failed; try again", metadata=error.metadata)

"""A sampler small enough for the client's tests, and the server that it shares with toy_trainer's trainer."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np

from paceline import codec, errors
from paceline.rpc.identity import ROUTE_KEY
from paceline.rpc.interceptors import ErrorInterceptor
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceServicer, add_SamplerServiceServicer_to_server
from paceline.trainer.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from paceline.types.v1 import model_pb2, sampling_pb2
from support.stacks.toy_trainer import ToyTrainer


class ToySampler(SamplerServiceServicer):
    """Continues a prompt by counting up."""

    def __init__(self) -> None:
        self.in_flight = self.most_in_flight = self.answered = 0
        self.crowd = 1
        self.crowded = asyncio.Event()
        """Set when `crowd` calls are in flight at once."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.refusals: list[errors.PacelineError] = []
        self.routes: list[str | bytes | None] = []
        self.stream_ended = asyncio.Event()
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.silent = False
        self.silent_after = -1
        """Token before which a stream falls silent."""

    async def Sample(self, request, context):
        self.routes.append(dict(context.invocation_metadata()).get(ROUTE_KEY))
        if self.refusals:
            raise self.refusals.pop(0)
        self.entered.set()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.in_flight >= self.crowd:
                self.crowded.set()
            await self.may_answer.wait()
            self.answered += 1
            return sampler_pb.SampleResponse(sequences=[self._complete(request)], model=self._served(request))
        finally:
            self.in_flight -= 1
            self.left.set()

    async def SampleStream(self, request, context) -> AsyncIterator[sampler_pb.SampleStreamResponse]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.entered.set()
        try:
            if self.silent:
                await asyncio.Event().wait()
            await self.may_answer.wait()
            for token in range(request.params.max_tokens):
                if token == self.silent_after:
                    await asyncio.Event().wait()
                yield sampler_pb.SampleStreamResponse(
                    index=0,
                    tokens=[token],
                    logprobs=[-1.0],
                    stop_reason=self._stop_reason(token, request),
                    model=self._served(request),
                )
        finally:
            self.stream_ended.set()

    async def ComputeLogprobs(self, request, context):
        tokens = codec.token_ids_from_proto(request.tokens, "tokens")
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return sampler_pb.ComputeLogprobsResponse(logprobs=codec.tensor_to_proto(logprobs), model=self._served(request))

    def _complete(self, request):
        prompt = codec.token_ids_from_proto(request.prompt, "prompt")
        tokens = prompt[-1] + 1 + np.arange(request.params.max_tokens, dtype=np.int32)
        return sampling_pb2.SampledSequence(
            tokens=codec.tensor_to_proto(tokens.astype(np.int32)),
            logprobs=codec.tensor_to_proto(np.zeros(len(tokens), np.float32)),
            stop_reason=sampling_pb2.STOP_REASON_LENGTH,
        )

    def _served(self, request):
        model = codec.model_ref_from_proto(request.model)
        return model_pb2.ServedModel(base_model="toy", run_id=model.run_id, version=model.version or 0)

    def _stop_reason(self, token, request):
        last = token == request.params.max_tokens - 1
        return sampling_pb2.STOP_REASON_LENGTH if last else sampling_pb2.STOP_REASON_UNSPECIFIED


class ToyServer:
    """Both services on one port, which they keep across a restart."""

    def __init__(self) -> None:
        self.trainer = ToyTrainer()
        self.sampler = ToySampler()
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", 32 << 20),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        )
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
        add_TrainerServiceServicer_to_server(self.trainer, self._server)
        add_SamplerServiceServicer_to_server(self.sampler, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Break every connection."""
        await self._server.stop(None)


@asynccontextmanager
async def toy_server() -> AsyncIterator[ToyServer]:
    server = ToyServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()

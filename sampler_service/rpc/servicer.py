"""Implements the RPCs: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import version
from time import perf_counter
from typing import Any

import grpc

from paceline import errors
from paceline.codec import (
    model_info_to_proto,
    model_ref_from_proto,
    quota_to_proto,
    sample_result_to_proto,
    sampling_params_from_proto,
    served_model_to_proto,
    spans_to_proto,
    tensor_to_proto,
    token_ids_from_proto,
)
from paceline.requests.pages import page_of
from paceline.rpc.identity import current_identity
from paceline.rpc.process_info import process_info
from paceline.rpc.readers import current_reader
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceServicer as Base
from paceline.types import ModelInfo, ModelRef, StreamedTokens
from paceline.types.training import Array
from paceline.types.v1 import model_pb2, sampling_pb2, tensor_pb2
from sampler_service.agreement import AgreementStatus
from sampler_service.engine.protocol import SamplerEngine, TextEndpoint
from sampler_service.sampling import Sampler
from sampler_service.settings import SamplerSettings
from sampler_service.stores.base import Versions
from sampler_service.transports.push import PushReceiver, read_pushed_manifest
from sampler_service.validation import SampleRequest, check_adapter_ref
from sampler_service.watcher import acknowledge

Context = grpc.aio.ServicerContext[Any, Any]


class SamplerServicer(Base):
    """paceline.sampler.v1.SamplerService."""

    def __init__(
        self,
        settings: SamplerSettings,
        engine: SamplerEngine,
        model: ModelInfo,
        sampler: Sampler,
        registry: Versions,
        receiver: PushReceiver,
        agreement: AgreementStatus,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._model = model
        self._service_version = version("paceline")
        self._sampler = sampler
        self._registry = registry
        self._receiver = receiver
        self._agreement = agreement

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        settings = self._settings
        return pb.GetServerInfoResponse(
            service_version=self._service_version,
            model=model_info_to_proto(self._model),
            engine=self._engine.name,
            engine_version=self._engine.version,
            bridge=settings.mode.bridge,
            serves=settings.mode.serves,
            max_active_versions=settings.max_active_versions,
            max_num_samples=settings.max_num_samples,
            sampler_id=settings.name_for_trainer,
            agreements=self._agreement.agreements(current_identity()),
            refusal=self._agreement.refusal or await self._death(),
            process=await asyncio.to_thread(process_info),
        )

    async def _death(self) -> str:
        """Return why the engine answers nothing; empty if it does."""
        try:
            await self._engine.check_health()
        except errors.EngineUnavailable as error:
            return error.message
        return ""

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        quotas = self._sampler.quotas(current_identity().tenant)
        return pb.GetUsageResponse(quotas=map(quota_to_proto, quotas))

    async def Sample(self, request: pb.SampleRequest, context: Context) -> pb.SampleResponse:
        decoded = replace(
            _sample_request(request),
            prompt_logprobs=request.prompt_logprobs,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_logprobs=request.topk_logprobs,
        )
        return sample_result_to_proto(await self._sampler.sample(decoded, current_identity().tenant))

    async def SampleStream(
        self, request: pb.SampleStreamRequest, context: Context
    ) -> AsyncIterator[pb.SampleStreamResponse]:
        tokens_of = self._sampler.stream(_sample_request(request), current_identity().tenant, current_reader().give_up)
        async with aclosing(tokens_of) as stream:
            async for tokens in stream:
                yield _stream_response(tokens)

    async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest, context: Context) -> pb.ComputeLogprobsResponse:
        ref, tokens = model_ref_from_proto(request.model), _tokens(request, "tokens")
        logprobs, served = await self._sampler.compute_logprobs(ref, tokens, current_identity().tenant)
        return pb.ComputeLogprobsResponse(logprobs=tensor_to_proto(logprobs), model=served_model_to_proto(served))

    async def CompleteText(
        self, request: pb.CompleteTextRequest, context: Context
    ) -> AsyncIterator[pb.CompleteTextResponse]:
        if not request.endpoint or request.endpoint not in pb.TextEndpoint.values():
            raise errors.MissingField("is not set; name the call of the API", field="endpoint")
        ref, endpoint = model_ref_from_proto(request.model), TextEndpoint(request.endpoint)
        answer = self._sampler.complete_text(ref, endpoint, request.body, current_identity().tenant)
        async with aclosing(answer) as parts:
            async for served, data in parts:
                yield pb.CompleteTextResponse(model=served_model_to_proto(served), data=data)

    async def LoadVersion(self, request: pb.LoadVersionRequest, context: Context) -> pb.LoadVersionResponse:
        ref = self._adapter_ref(request.model)
        async with self._registry.lease(ref, current_identity().tenant) as lease:
            return pb.LoadVersionResponse(
                model=served_model_to_proto(lease.served), milliseconds=lease.load_milliseconds
            )

    async def UnloadVersion(self, request: pb.UnloadVersionRequest, context: Context) -> pb.UnloadVersionResponse:
        ref = self._adapter_ref(request.model)
        if ref.run_id and ref.version is None:
            raise errors.MissingField("is not set; name the version to unload", field="model.version.version")
        self._registry.unload(ref, current_identity().tenant)
        return pb.UnloadVersionResponse()

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        identity = current_identity()
        visible = [
            entry
            for entry in self._registry
            if (identity.is_peer or entry.tenant == identity.tenant) and request.run_id in {"", entry.served.run_id}
        ]
        page, token = page_of(
            visible, lambda entry: f"{entry.adapter.adapter_id:020d}", request.page_size, request.page_token
        )
        versions = [
            pb.LoadedVersion(
                model=served_model_to_proto(entry.served),
                requests_in_flight=entry.requests_in_flight,
                size_bytes=entry.staged.manifest.total_size,
            )
            for entry in page
        ]
        return pb.ListVersionsResponse(versions=versions, next_page_token=token)

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[pb.UpdateWeightsRequest], context: Context
    ) -> pb.UpdateWeightsResponse:
        parts = aiter(request_iterator)
        manifest = await read_pushed_manifest(parts)
        arrival = self._registry.arrivals.expect(manifest.model.run_id)
        staged = await self._receiver.receive(manifest, parts, current_identity())
        start = perf_counter()
        entry = await self._registry.install(staged, arrival)
        milliseconds = 1e3 * (perf_counter() - start)
        return pb.UpdateWeightsResponse(
            acknowledgement=acknowledge(entry, self._settings.name_for_trainer, milliseconds)
        )

    def _adapter_ref(self, message: model_pb2.ModelRef) -> ModelRef:
        ref = model_ref_from_proto(message)
        check_adapter_ref(ref, self._model)
        return ref


def _sample_request(request: pb.SampleRequest | pb.SampleStreamRequest) -> SampleRequest:
    return SampleRequest(
        ref=model_ref_from_proto(request.model),
        prompt=_tokens(request, "prompt"),
        params=sampling_params_from_proto(request.params),
        num_samples=request.num_samples or 1,
    )


def _tokens(request: pb.SampleRequest | pb.SampleStreamRequest | pb.ComputeLogprobsRequest, field: str) -> Array:
    tensor: tensor_pb2.Tensor = getattr(request, field)
    if not tensor.ByteSize():
        raise errors.MissingField("is not set; send token ids", field=field)
    return token_ids_from_proto(tensor, field)


def _stream_response(tokens: StreamedTokens) -> pb.SampleStreamResponse:
    stop = tokens.stop_reason
    return pb.SampleStreamResponse(
        index=tokens.index,
        tokens=tokens.tokens,
        logprobs=tokens.logprobs,
        stop_reason=sampling_pb2.StopReason.ValueType(stop.value if stop else 0),
        model=served_model_to_proto(tokens.model),
        version_spans=spans_to_proto(tokens.version_spans),
    )

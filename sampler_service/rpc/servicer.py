"""Implements the RPCs: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
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
from paceline.pages import page_of
from paceline.rpc.identity import current_identity
from paceline.rpc.readers import current_reader
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceServicer as Base
from paceline.types import ModelInfo, ModelRef, StreamedTokens
from paceline.types.training import Array
from paceline.types.v1 import model_pb2, sampling_pb2, tensor_pb2
from sampler_service.agreement.standing import Standing
from sampler_service.engine.protocol import TextEndpoint
from sampler_service.quotas import Quotas
from sampler_service.requests.request import SampleRequest
from sampler_service.requests.validation import check_adapter_ref
from sampler_service.sampling import Sampler
from sampler_service.stores.base import Versions
from sampler_service.stores.leases import LoadedVersion
from sampler_service.stores.resolver import VersionResolver
from sampler_service.transports.push import PushReceiver
from sampler_service.watcher import acknowledge

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The constant part of GetServerInfo's response."""

    service_version: str
    model: ModelInfo
    engine: str
    engine_version: str
    bridge: str
    serves: str
    max_active_versions: int
    max_num_samples: int
    sampler_id: str


class SamplerServicer(Base):
    """paceline.sampler.v1.SamplerService."""

    def __init__(
        self,
        info: ServerInfo,
        sampler: Sampler,
        registry: Versions,
        resolver: VersionResolver,
        receiver: PushReceiver,
        standing: Standing,
        quotas: Quotas,
    ) -> None:
        self._info = info
        self._quotas = quotas
        self._sampler = sampler
        self._registry = registry
        self._resolver = resolver
        self._receiver = receiver
        self._standing = standing

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        info = self._info
        return pb.GetServerInfoResponse(
            service_version=info.service_version,
            model=model_info_to_proto(info.model),
            engine=info.engine,
            engine_version=info.engine_version,
            bridge=info.bridge,
            serves=info.serves,
            max_active_versions=info.max_active_versions,
            max_num_samples=info.max_num_samples,
            sampler_id=info.sampler_id,
            agreements=self._standing.agreements(current_identity()),
            refusal=self._standing.refusal,
        )

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        quotas = self._quotas.of(current_identity().tenant)
        return pb.GetUsageResponse(quotas=map(quota_to_proto, quotas))

    async def Sample(self, request: pb.SampleRequest, context: Context) -> pb.SampleResponse:
        decoded = SampleRequest(
            ref=model_ref_from_proto(request.model),
            prompt=_tokens(request, "prompt"),
            params=sampling_params_from_proto(request.params),
            num_samples=request.num_samples or 1,
            prompt_logprobs=request.prompt_logprobs,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_logprobs=request.topk_logprobs,
        )
        return sample_result_to_proto(await self._sampler.sample(decoded, current_identity().tenant))

    async def SampleStream(
        self, request: pb.SampleStreamRequest, context: Context
    ) -> AsyncIterator[pb.SampleStreamResponse]:
        decoded = SampleRequest(
            ref=model_ref_from_proto(request.model),
            prompt=_tokens(request, "prompt"),
            params=sampling_params_from_proto(request.params),
            num_samples=request.num_samples or 1,
        )
        tokens_of = self._sampler.stream(decoded, current_identity().tenant, current_reader().give_up)
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
            raise errors.MissingField("is not set; say which call of the API it is", field="endpoint")
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
        page, token = page_of(visible, _page_key, request.page_size, request.page_token)
        return pb.ListVersionsResponse(versions=[_loaded_to_proto(entry) for entry in page], next_page_token=token)

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[pb.UpdateWeightsRequest], context: Context
    ) -> pb.UpdateWeightsResponse:
        staged = await self._receiver.receive(aiter(request_iterator), current_identity())
        start = perf_counter()
        entry = await self._registry.install(staged)
        milliseconds = 1e3 * (perf_counter() - start)
        self._resolver.pushed(entry.served.run_id, entry.served.version)
        self._registry.retire_superseded(entry.served.run_id)
        return pb.UpdateWeightsResponse(acknowledgement=acknowledge(entry, self._info.sampler_id, milliseconds))

    def _adapter_ref(self, message: model_pb2.ModelRef) -> ModelRef:
        ref = model_ref_from_proto(message)
        check_adapter_ref(ref, self._info.model)
        return ref


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


def _page_key(entry: LoadedVersion) -> str:
    return f"{entry.adapter.adapter_id:020d}"


def _loaded_to_proto(entry: LoadedVersion) -> pb.LoadedVersion:
    return pb.LoadedVersion(
        model=served_model_to_proto(entry.served),
        requests_in_flight=entry.requests_in_flight,
        size_bytes=entry.size_bytes,
    )

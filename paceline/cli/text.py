"""Text from a sampler, as it is sampled: completions of a prompt, and answers in a conversation.

The sampler tokenizes and applies the chat template, as for OpenAI's clients, so nothing needs to be installed here.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from paceline import ServiceClient, codec
from paceline.cli.connect import find_run
from paceline.cli.output import CommandFailed
from paceline.client.transport import read
from paceline.layout import SCHEME, CheckpointPath
from paceline.rpc.identity import ROUTE_KEY
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import ModelRef, ServedModel

BASE = "base"
"""Names the base model."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one completion."""

    index: int
    text: str
    finish_reason: str
    """Set on the completion's last piece: stop or length, for example."""
    model: ServedModel
    """The weights that it came from."""


def find_weights(service: ServiceClient, named: str) -> ModelRef:
    """Return the weights that a name means: base, a run (its newest version), run@3, or a sampler checkpoint's path."""
    if named in {"", BASE}:
        return ModelRef()
    if named.startswith(SCHEME):
        CheckpointPath.parse(named)
        return ModelRef(checkpoint=named)
    run, at, version = named.partition("@")
    if at and not (version.isdecimal() and int(version)):
        raise CommandFailed(f"{named} names no version; give the run alone for its newest, or RUN@NUMBER")
    run_id = find_run(service, run).run_id
    return ModelRef(run_id=run_id, version=int(version) if at else None)


def complete(service: ServiceClient, model: ModelRef, prompt: str, settings: Mapping[str, Any]) -> Generator[Piece]:
    """Yield completions of a prompt."""
    for served, event in _events(service, model, pb.TEXT_ENDPOINT_COMPLETIONS, {"prompt": prompt, **settings}):
        for choice in event.get("choices", ()):
            yield Piece(choice["index"], choice.get("text") or "", choice.get("finish_reason") or "", served)


def answer(
    service: ServiceClient, model: ModelRef, messages: list[dict[str, str]], settings: Mapping[str, Any]
) -> Generator[Piece]:
    """Yield the answer to a conversation."""
    body = {"messages": messages, **settings}
    for served, event in _events(service, model, pb.TEXT_ENDPOINT_CHAT_COMPLETIONS, body):
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            yield Piece(choice["index"], text, choice.get("finish_reason") or "", served)


def called(model: ServedModel) -> str:
    """Return how people name the weights that answered."""
    if model.checkpoint:
        return model.checkpoint
    return f"{model.run_id}@{model.version}" if model.run_id else model.base_model


def _events(
    service: ServiceClient, model: ModelRef, endpoint: pb.TextEndpoint.ValueType, body: Mapping[str, Any]
) -> Iterator[tuple[ServedModel, dict[str, Any]]]:
    transport = service.transport
    content = json.dumps({"model": BASE, "stream": True, **body}).encode()
    request = pb.CompleteTextRequest(model=codec.model_ref_to_proto(model), endpoint=endpoint, body=content)
    route = () if model.is_base else ((ROUTE_KEY, str(model)),)
    opening = transport.open_stream(transport.sampler.CompleteText, request, "sampling", route)
    call, part = transport.submit(opening).result()

    async def following() -> pb.CompleteTextResponse | None:
        try:
            return await read(call)
        except grpc.aio.AioRpcError as failure:
            raise transport.error(failure, request, "sampling") from failure

    try:
        while part is not None:
            yield codec.served_model_from_proto(part.model), json.loads(part.data)
            part = transport.submit(following()).result()
    finally:
        transport.run_soon(lambda: transport.end_stream(call))

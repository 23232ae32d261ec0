"""gRPC reflection as v1 and v1alpha: clients try v1 first, but the library serves only v1alpha.

The two differ only in the package name, which is not part of a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

SERVICE: str = reflection.SERVICE_NAME
"""The v1alpha service, which also describes itself."""
_V1 = "grpc.reflection.v1.ServerReflection"
_METHOD = "ServerReflectionInfo"
METHODS = (f"/{SERVICE}/{_METHOD}", f"/{_V1}/{_METHOD}")


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Add reflection for services, given by their full names, to a server."""
    servicer = ReflectionServicer([*services, SERVICE])
    add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_V1, {_METHOD: handler}),))

"""TLS and mTLS at the gateway."""

from __future__ import annotations

import grpc
import pytest
from prometheus_client import CollectorRegistry
from support.certificates import Pem, make_pem
from support.patience import PATIENCE
from support.stacks.gateway_stack import free_port

from gateway.service import GatewayService
from gateway.settings import GatewaySettings
from paceline import ServiceClient, Timeouts, errors
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceStub
from paceline.rpc.channel import TlsFiles, open_channel
from paceline.rpc.server import Readiness, make_server


@pytest.fixture
def server_pem(tmp_path) -> Pem:
    return make_pem(tmp_path, "server")


@pytest.fixture
def client_pem(tmp_path) -> Pem:
    return make_pem(tmp_path, "client")


@pytest.fixture
async def address(server_pem, client_pem, request):
    """Address of a gateway with TLS, or with mTLS where the test asks for it."""
    address = f"127.0.0.1:{free_port()}"
    settings = GatewaySettings(
        insecure=True,
        listen=address,
        tls_cert=server_pem.cert,
        tls_key=server_pem.key,
        tls_client_ca=client_pem.cert if request.param == "mtls" else None,
        trainer=f"127.0.0.1:{free_port()}",
        samplers=(f"127.0.0.1:{free_port()}",),
    )
    service = GatewayService(settings)
    await service.start(Readiness(service.service_names))
    server = make_server(service, settings, CollectorRegistry())
    await server.start()
    yield address
    await server.stop(None)
    await service.stop()


async def _who_am_i(address: str, tls: TlsFiles | None) -> str:
    async with open_channel(address, tls) as channel:
        return (await GatewayServiceStub(channel).WhoAmI(pb.WhoAmIRequest(), timeout=PATIENCE)).tenant


@pytest.mark.parametrize("address", ["tls"], indirect=True)
async def test_tls_serves_those_who_trust_the_certificate(address, server_pem, client_pem):
    assert await _who_am_i(address, TlsFiles(server_pem.cert)) == "default"
    for tls in (None, TlsFiles(client_pem.cert)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _who_am_i(address, tls)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("address", ["mtls"], indirect=True)
async def test_mtls_serves_those_with_a_certificate_of_the_authority(address, server_pem, client_pem, tmp_path):
    assert await _who_am_i(address, TlsFiles(server_pem.cert, client_pem.cert, client_pem.key)) == "default"
    stranger = make_pem(tmp_path, "stranger")
    for tls in (TlsFiles(server_pem.cert), TlsFiles(server_pem.cert, stranger.cert, stranger.key)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _who_am_i(address, tls)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("secure", [False, True])
async def test_a_client_at_the_http_port_is_told_to_use_the_other_one(server_pem, tmp_path, secure):
    address = f"127.0.0.1:{free_port()}"
    settings = GatewaySettings(
        insecure=True,
        listen=f"127.0.0.1:{free_port()}",
        http_listen=address,
        http_state=tmp_path,
        tls_cert=server_pem.cert if secure else None,
        tls_key=server_pem.key if secure else None,
        trainer=f"127.0.0.1:{free_port()}",
        samplers=(f"127.0.0.1:{free_port()}",),
    )
    service = GatewayService(settings)
    await service.start(Readiness(service.service_names))
    authorities = server_pem.cert if secure else None
    async with ServiceClient(address, tls_ca=authorities, timeouts=Timeouts(connect=1.0)) as client:
        with pytest.raises(errors.UpstreamUnavailable, match=f"{address} is an HTTP/1.1 port.*gRPC port") as caught:
            await client.list_runs_async()
    assert caught.value.field == "address"
    await service.stop()

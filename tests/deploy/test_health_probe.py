"""`python -m paceline.rpc.health`, the probe of the compose files."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from support.stacks.deploy_files import GRPC_SERVICES

from paceline.gateway.v1 import gateway_service_pb2
from paceline.rpc.health import main
from paceline.sampler.v1 import sampler_service_pb2
from paceline.trainer.v1 import trainer_service_pb2

TRAINER = GRPC_SERVICES["trainer"]


@pytest.fixture
def health() -> Iterator[tuple[str, HealthServicer]]:
    """Yield a health port's address and the servicer behind it."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    servicer = HealthServicer()
    add_HealthServicer_to_server(servicer, server)
    number = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{number}", servicer
    server.stop(None).wait()


def test_a_live_process_passes(health: tuple[str, HealthServicer]) -> None:
    main([health[0]])


def test_a_ready_service_passes(health: tuple[str, HealthServicer]) -> None:
    health[1].set(TRAINER, HealthCheckResponse.SERVING)
    main([health[0], TRAINER])


def test_a_service_that_is_not_ready_fails(health: tuple[str, HealthServicer]) -> None:
    health[1].set(TRAINER, HealthCheckResponse.NOT_SERVING)
    with pytest.raises(SystemExit, match="NOT_SERVING"):
        main([health[0], TRAINER])


def test_a_service_that_the_port_does_not_know_fails(health: tuple[str, HealthServicer]) -> None:
    with pytest.raises(SystemExit, match="NOT_FOUND"):
        main([health[0], TRAINER])


def test_a_port_that_nobody_listens_on_fails() -> None:
    with pytest.raises(SystemExit, match="UNAVAILABLE"):
        main(["127.0.0.1:1", "--timeout", "5"])


def test_probed_services_are_in_the_contracts() -> None:
    contracts = (gateway_service_pb2, trainer_service_pb2, sampler_service_pb2)
    known = {service.full_name for module in contracts for service in module.DESCRIPTOR.services_by_name.values()}
    assert set(GRPC_SERVICES.values()) <= known

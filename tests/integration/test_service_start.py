"""The message of a service that cannot start."""

from __future__ import annotations

import os

import pytest
from prometheus_client import CollectorRegistry

from paceline.errors import Unsupported
from paceline.rpc.server import serve
from paceline.settings import ServiceSettings

SENTENCE = "tiny cannot be served: model.layers.0.mixer (Mixer) computes different results."


class Refusing:
    """A service that cannot start."""

    name = "refusing"
    service_names = ("paceline.gateway.v1.GatewayService",)
    stopped = False

    def interceptors(self):
        return ()

    async def start(self, _readiness) -> None:
        raise Unsupported(SENTENCE)

    def register(self, server) -> None:
        """Register no servicer."""

    def drain(self) -> None:
        """Do nothing: no request is in flight."""

    async def stop(self) -> None:
        self.stopped = True


async def test_a_service_that_cannot_start_ends_with_the_sentence_of_its_error():
    service, before = Refusing(), os.umask(0o077)
    try:
        with pytest.raises(SystemExit) as ended:
            await serve(service, ServiceSettings(), CollectorRegistry())
    finally:
        os.umask(before)
    assert ended.value.code == SENTENCE
    assert service.stopped

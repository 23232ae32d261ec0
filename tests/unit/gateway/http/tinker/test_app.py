"""How Tinker's API is put together."""

from __future__ import annotations

import pytest

from gateway.admission import FairQueue
from gateway.http.services import Services
from gateway.http.tinker.app import TinkerApi
from gateway.http.tinker.futures import Posted
from gateway.http.tinker.store import Model
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from paceline import errors
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.tinker.v1 import tinker_pb2
from paceline.trainer.v1 import trainer_service_pb2 as pb

LIMIT = 100


class Sent(Exception):
    pass


class Router:
    async def choose(self, method, key, patience):
        raise Sent


async def test_work_does_not_wait_for_bytes_that_it_counts_itself(tmp_path):
    waiting = WaitingBytes(tenant_limit=LIMIT)
    services = Services(Router(), Tenants(), FairQueue(8, 8, 8), waiting)
    api = TinkerApi(services, waiting, GatewaySettings(insecure=True, http_state=tmp_path))
    await api.store.add_model(Model("m", "tenant", "s", "run-1", "base", 1, 0.0, 0.0, {}, {}))
    waiting.add("tenant", LIMIT)
    batch = tinker_pb2.ForwardBackwardRequest(model_id="m")
    with pytest.raises(errors.QuotaExceeded):
        await services.call("tenant", pb.OptimStepRequest(run_id="run-1"), pb.OptimStepResponse)
    with pytest.raises(Sent):
        await api._futures._kinds["forward_backward"].run("tenant", Posted(batch))
    await api.stop()

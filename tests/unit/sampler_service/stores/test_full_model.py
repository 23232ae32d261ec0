"""The whole model that an engine holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import mkdtemp

from prometheus_client import CollectorRegistry
from support.stacks.sampler_stack import until

from paceline.layout import new_run_id
from paceline.types import ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import VersionResolver
from sampler_service.stores.full_model import ModelSlot
from sampler_service.transports.base import StagedAdapter, VersionKey

RUN = new_run_id()


class Engine:
    model_path = Path("base")

    async def check_health(self):
        pass

    async def change_model(self, model_path, contents=None):
        assert model_path.exists()


class Bridge:
    """Fetches a model into a new directory each time, once `gate` is open."""

    needs_volume = False

    def __init__(self, root):
        self.root = root
        self.gate = asyncio.Event()
        self.fetches = 0

    async def describe(self, _ref, _tenant):
        manifest = pb.Manifest(tenant="team")
        manifest.model.run_id, manifest.model.version, manifest.model.blake3 = RUN, 1, "a" * 64
        return manifest

    async def fetch(self, ref, tenant):
        self.fetches += 1
        await self.gate.wait()
        directory = Path(mkdtemp(dir=self.root))
        return StagedAdapter(await self.describe(ref, tenant), directory, temporary=True)


async def test_a_model_that_was_fetched_twice_leaves_no_files(tmp_path):
    async def set_ready(_):
        pass

    async def request():
        async with slot.lease(ModelRef(run_id=RUN), "team") as lease:
            return lease.served.version

    bridge = Bridge(tmp_path)
    slot = ModelSlot(
        Engine(), bridge, VersionResolver(bridge), "base", 60, set_ready, SamplerMetrics(CollectorRegistry())
    )
    requested = asyncio.create_task(request())
    await until(lambda: bridge.fetches == 1)
    announced = asyncio.create_task(slot.fetch(VersionKey(RUN, 1)))
    await until(lambda: bridge.fetches == 2)
    bridge.gate.set()
    assert await requested == 1
    assert (await announced).served.version == 1
    await until(lambda: not list(tmp_path.iterdir()))
    await slot.close()

"""One sampler with vLLM, many versions, tenants and requests: what fits, what waits, and who sees what."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
import pytest_asyncio
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.gateway_stack import bearer, gateway
from support.stacks.sampler_stack import Client, base_ref, sample_request, sampling, version_ref
from support.stacks.weight_stack import Trainer, make_checkpoint, make_version, serving

from paceline import errors
from paceline.files.key_changes import add_key
from paceline.layout import Volume, new_run_id
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types.v1 import model_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

_RUN_ID = re.compile("run-[0-9a-f]{32}")
SLOTS, IN_MEMORY, ON_DISK, VERSIONS = 4, 8, 40, 64
LONG = list(b"a prompt of more than one block of the cache, which holds thirty-two tokens a block") * 2


@dataclass
class Setup:
    """A sampler with few slots, and the trainer that it follows."""

    client: Client
    trainer: Trainer
    volume: Volume
    model: object


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory, vllm_here):
    folder = tmp_path_factory.mktemp("load")
    model, volume = make_tiny_llama(folder / "model"), Volume(folder / "volume")
    trainer, engine = Trainer(volume), {"engine": "vllm", "enforce_eager": True}
    limits = {"max_active_versions": SLOTS, "max_loaded_versions": IN_MEMORY, "max_disk_versions": ON_DISK}
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(trainer))
        vllm = sampling(model, port, folder, scratch_dir=folder / "scratch", **engine, **limits)
        yield Setup(await stack.enter_async_context(vllm), trainer, volume, model)


async def test_many_versions_in_turn_on_few_slots_are_all_found(setup):
    run_id, client = new_run_id(), setup.client
    for version in range(1, VERSIONS + 1):
        make_version(setup.volume, setup.model, run_id, version)

    async def in_turn():
        """Request every version, with more requests in flight than there are slots."""
        limit = asyncio.Semaphore(6)

        async def ask(version):
            async with limit:
                return await client.logprobs(version_ref(run_id, version))

        return await asyncio.gather(*map(ask, range(1, VERSIONS + 1)))

    first, second = await in_turn(), await in_turn()
    assert [served.version for _, served in second] == list(range(1, VERSIONS + 1))
    for (before, _), (after, _) in zip(first, second, strict=True):
        np.testing.assert_allclose(np.frombuffer(before, np.float32), np.frombuffer(after, np.float32), atol=1e-4)
    assert len({logprobs for logprobs, _ in first}) == VERSIONS
    assert (client.metric("slots"), client.metric("versions_loaded")) == (SLOTS, IN_MEMORY)
    assert client.metric("versions_on_disk") == ON_DISK
    size = (await client.loaded())[VERSIONS].size_bytes
    assert client.metric("versions_loaded_bytes") == IN_MEMORY * size
    assert client.metric("versions_on_disk_bytes") == ON_DISK * size
    assert client.metric("slots_bytes") >= SLOTS * size


@dataclass
class Tenant:
    """A tenant that calls through the gateway, with a run of its own."""

    stub: object
    key: str
    run_id: str

    async def call(self, method, request):
        try:
            return await getattr(self.stub, method)(request, metadata=(bearer(self.key),), timeout=PATIENCE)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    async def hits(self, ref):
        """Return how many tokens of the long prompt were found in the prefix cache."""
        answer = await self.call("Sample", sample_request(ref, prompt=LONG, max_tokens=1))
        return answer.prompt_cache_hit_tokens

    async def tokens(self, ref):
        answer = await self.call("Sample", sample_request(ref, temperature=0, max_tokens=12))
        return answer.sequences[0].tokens.data

    def best(self):
        return model_pb2.ModelRef(checkpoint=f"paceline://{self.run_id}/sampler/best")


@pytest_asyncio.fixture(loop_scope="module")
async def tenants(setup, tmp_path):
    """Two tenants whose runs have a version with the same number and a checkpoint with the same name."""
    keys = {tenant: add_key(tmp_path / "keys.json", tenant, tenant) for tenant in ("sprinter", "grimpeur")}
    async with gateway(1, [setup.client.address], tmp_path / "keys.json") as client:
        found = [Tenant(client.sampler, key, new_run_id()) for key in keys.values()]
        for seed, (name, tenant) in enumerate(zip(keys, found, strict=True), start=1):
            make_version(setup.volume, setup.model, tenant.run_id, 1, seed=seed, tenant=name)
            make_checkpoint(setup.volume, setup.model, tenant.best().checkpoint, seed=seed, tenant=name)
        yield found


async def test_tenants_with_the_same_names_have_each_their_own_weights(setup, tenants):
    one, other = tenants
    said = [await tenant.tokens(ref) for tenant in tenants for ref in (tenant.best(), version_ref(tenant.run_id, 1))]
    assert said[0] == said[1] != said[2] == said[3]
    for mine, theirs in ((one, other), (other, one)):
        listed = (await mine.call("ListVersions", pb.ListVersionsRequest())).versions
        assert [entry.model.run_id for entry in listed] == [mine.run_id, mine.run_id]
        for ref, absent in (
            (version_ref(theirs.run_id, 1), version_ref(new_run_id(), 1)),
            (theirs.best(), model_pb2.ModelRef(checkpoint=f"paceline://{new_run_id()}/sampler/best")),
        ):
            for method, request in (("Sample", sample_request), ("LoadVersion", _load), ("UnloadVersion", _unload)):
                assert await _failure(mine, method, request(ref)) == await _failure(mine, method, request(absent))


@pytest.mark.parametrize("weights", ["base model", "version", "checkpoint"])
async def test_no_tenant_finds_what_another_left_in_the_prefix_cache(tenants, weights):
    for tenant in tenants:
        own = {"version": version_ref(tenant.run_id, 1), "checkpoint": tenant.best()}
        ref = own.get(weights, base_ref())
        assert await tenant.hits(ref) == 0
        assert await tenant.hits(ref) > 0


async def _failure(tenant, method, request):
    with pytest.raises(errors.NotFound) as failure:
        await tenant.call(method, request)
    # The error names the run that was asked for.
    return type(failure.value), _RUN_ID.sub("run-", failure.value.message), failure.value.field


def _load(ref):
    return pb.LoadVersionRequest(model=ref)


def _unload(ref):
    return pb.UnloadVersionRequest(model=ref)

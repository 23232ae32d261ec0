"""Which weights are served after a write in place; the engine is one that has nothing to compute."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from support.stacks.weight_stack import BASE, TENANT

from paceline import errors
from paceline.base_model.weight_sharing import WriteRequest
from paceline.layout import new_run_id
from paceline.types import ModelRef
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import VersionResolver
from sampler_service.stores.in_place import InPlaceSlot

RUN = new_run_id()


class Engine:
    """Lets itself be written."""

    async def begin_write(self, version: int) -> None: ...

    async def end_write(self, version: int) -> None: ...


@pytest.fixture
def slot():
    return InPlaceSlot(Engine(), None, VersionResolver(None), BASE, 5, SamplerMetrics(CollectorRegistry()))


async def test_a_version_whose_run_is_deleted_while_it_is_written_is_not_served(slot):
    other, ref = new_run_id(), ModelRef(run_id=RUN, version=2)
    with pytest.raises(errors.RunNotFound):
        async with slot.writing(WriteRequest("", RUN, 2, TENANT)):
            slot.forget_run(RUN)
    with pytest.raises(errors.ModelNotFound, match="written over the base model"):
        async with slot.lease(ModelRef(), TENANT):
            pass
    async with slot.writing(WriteRequest("", other, 1, TENANT)):
        pass
    async with slot.lease(ModelRef(run_id=other), TENANT) as lease:
        assert (lease.served.run_id, lease.served.version) == (other, 1)
    assert not slot.serves(ref)


async def test_after_an_interrupted_write_no_request_starts_before_a_complete_one(slot):
    version = ModelRef(run_id=RUN, version=1)
    with pytest.raises(ConnectionError):
        async with slot.writing(WriteRequest("", RUN, 1, TENANT)):
            raise ConnectionError("the writer died")
    assert not slot.serves(ModelRef()), "the base model's weights are written over in part"
    for ref in (ModelRef(), version):
        with pytest.raises(errors.EngineUnavailable, match="interrupted"):
            async with slot.lease(ref, TENANT):
                pass
    async with slot.writing(WriteRequest("", RUN, 1, TENANT)):
        pass
    async with slot.lease(version, TENANT) as lease:
        assert lease.is_current()
        with pytest.raises(ConnectionError):
            async with slot.writing(WriteRequest("", RUN, 2, TENANT)):
                raise ConnectionError("the writer died")
        assert not lease.is_current()

"""Weights that are removed while they are fetched: they are sent whole, or are not found."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.weight_stack import BASE, make_version

from paceline import errors
from paceline.layout import WEIGHTS_FILE, Volume, new_run_id
from paceline.rpc import identity
from paceline.types.v1 import model_pb2
from paceline.weights.v1 import weight_service_pb2 as pb
from paceline.weights.wire import read_part
from trainer_service.rpc.weight_servicer import WeightServicer

RUN = new_run_id()


@pytest.fixture
def version(tmp_path):
    volume = Volume(tmp_path / "volume")
    make_version(volume, make_tiny_llama(tmp_path / BASE), RUN, 1)
    return volume.version(RUN, 1)


@pytest.fixture
def fetch(version, monkeypatch):
    publisher = SimpleNamespace(find=lambda run, number: version, staged_manifest=lambda directory: None)
    registry = SimpleNamespace(get=lambda run_id, caller: run_id)
    servicer = WeightServicer(None, None, publisher, registry, None, None, None)
    monkeypatch.setattr("trainer_service.rpc.weight_servicer.current_identity", lambda: identity.Identity("tenant"))
    ref = model_pb2.ModelRef(version=model_pb2.VersionRef(run_id=RUN, version=1))
    return lambda: servicer.FetchVersion(pb.FetchVersionRequest(model=ref), None)


async def test_what_is_removed_after_its_manifest_was_sent_is_sent_whole(fetch, version):
    whole = (version / WEIGHTS_FILE).read_bytes()
    replies = fetch()
    await anext(replies)
    shutil.rmtree(version)
    assert b"".join([bytes(read_part(reply).data) async for reply in replies]) == whole


async def test_what_is_removed_while_it_is_opened_is_not_found(fetch, version):
    (version / WEIGHTS_FILE).unlink()
    with pytest.raises(errors.VersionNotFound):
        await anext(fetch())

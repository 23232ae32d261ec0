"""Every method of every contract is listed, and unlisted methods are closed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from gateway.access import ACCESS, Access
from gateway.proxy import SERVICES

_PROTO = Path(__file__).resolve().parents[3] / "proto"


def _methods() -> set[str]:
    found = set()
    for contract in _PROTO.rglob("*_service.proto"):
        module = import_module(".".join(contract.relative_to(_PROTO).with_suffix("").parts) + "_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return found


def test_every_method_of_every_contract_is_listed():
    assert {method for method in ACCESS if method.startswith("/paceline.")} == _methods()


def test_the_proxy_knows_every_service():
    assert set(SERVICES) == {method.split("/")[1] for method in _methods()}


@pytest.mark.parametrize(
    "method", ["/paceline.weights.v1.WeightService/WatchVersions", "/paceline.sampler.v1.SamplerService/UpdateWeights"]
)
def test_what_services_say_to_each_other_is_closed(method):
    assert ACCESS[method] is Access.NOBODY


def test_the_table_cannot_be_changed_at_run_time():
    with pytest.raises(TypeError):
        ACCESS["/x/Y"] = Access.TENANT  # type: ignore[index]

"""Failures that the gateway reports itself, in place of a service, and its memory of who holds which version."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from gateway.proxy import Holders, Upstream, gateway_error
from paceline import errors
from paceline.rpc.status import DETAILS_KEY, status_code, status_details

TRAINER = SimpleNamespace(name="trainer")


def _failure(code: grpc.StatusCode, *trailing: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing))


def _failure_of(error: errors.PacelineError) -> grpc.aio.AioRpcError:
    return _failure(status_code(error), (DETAILS_KEY, status_details(error)))


def test_a_refused_credential_names_what_the_operator_has_to_do():
    error = gateway_error(_failure_of(errors.MissingCredential("call the gateway")), TRAINER)
    assert isinstance(error, errors.MissingCredential)
    assert "the trainer refuses the gateway's credential; the operator" in error.message


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_service_that_cannot_be_reached_or_stops_is_named(code):
    error = gateway_error(_failure(code), TRAINER)
    assert isinstance(error, errors.UpstreamUnavailable)
    assert "trainer" in error.message


@pytest.mark.parametrize(
    "error",
    [errors.EngineUnavailable("later"), errors.InvalidApiKey("no"), errors.RunNotFound("x"), errors.Cancelled("gone")],
)
def test_the_errors_of_a_service_are_its_own(error):
    assert gateway_error(_failure_of(error), TRAINER) is None


@pytest.fixture
async def sampler():
    upstream = Upstream("sampler", "127.0.0.1:1", None)
    yield upstream
    await upstream.close()


async def test_a_tenant_that_names_many_versions_forgets_its_own(sampler):
    holders = Holders(8)
    used = [("quiet", f"run@{number}") for number in range(3)]
    for key in used:
        holders.add(key, sampler)
    named = [("loud", f"run@{number}") for number in range(100)]
    for key in named:
        holders.add(key, sampler)
    assert [key for key in (*used, *named) if holders.of(key)] == [*used, *named[-5:]]


async def test_tenants_share_what_is_remembered(sampler):
    holders = Holders(8)
    keys = [(tenant, f"run@{number}") for tenant in ("first", "second") for number in range(20)]
    for key in keys:
        holders.add(key, sampler)
    assert [key for key in keys if holders.of(key)] == [*keys[16:20], *keys[36:40]]


async def test_the_version_that_was_not_used_for_longest_is_forgotten(sampler):
    holders = Holders(2)
    for version in ("old", "new", "old", "newest"):
        holders.add(("tenant", version), sampler)
    assert not holders.of(("tenant", "new"))
    assert holders.of(("tenant", "old"))
    holders.discard(("tenant", "old"), sampler)
    assert not holders.of(("tenant", "old"))

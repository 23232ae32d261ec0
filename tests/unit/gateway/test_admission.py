"""Admission: methods that are closed, tokens that are known, and places for calls, handed out in turn."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.admission import ACCESS, Access, AnonymousAuthenticator, FairQueue, JwtVerifier
from gateway.proxy import SERVICES
from paceline import errors
from paceline.extras import MissingExtra
from paceline.rpc.identity import Identity

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


def test_an_insecure_gateway_makes_every_caller_the_default_tenant():
    anonymous = AnonymousAuthenticator()
    assert anonymous.identify("") == anonymous.identify("anything") == Identity("default")


@pytest.fixture(scope="module")
def signing_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def public_pem(signing_key, tmp_path) -> Path:
    path = tmp_path / "public.pem"
    encoding = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(signing_key.public_key().public_bytes(*encoding))
    return path


def _claims(**changes: object) -> dict[str, object]:
    claims = {"tenant": "team-a", "sub": "alice", "exp": time.time() + 600} | changes
    return {name: value for name, value in claims.items() if value is not None}


def test_a_signed_token_names_its_tenant(signing_key, public_pem):
    token = jwt.encode(_claims(), signing_key, "ES256")
    assert JwtVerifier(public_pem, "ES256", "tenant").identify(token) == Identity("team-a", "alice")


def test_a_token_admits_until_it_expires_and_as_long_as_its_key_is_known(signing_key, public_pem):
    verifier, another = (JwtVerifier(public_pem, "ES256", "tenant", audience) for audience in ("", "paceline"))
    identity = verifier.identify(jwt.encode(_claims(), signing_key, "ES256"))
    assert verifier.still_admits(identity)
    assert not another.still_admits(identity)
    assert not verifier.still_admits(replace(identity, credential=identity.credential.partition(":")[0] + ":1"))


@pytest.mark.parametrize(
    "changes",
    [{"exp": 1.0}, {"exp": None}, {"tenant": None}, {"tenant": ""}, {"tenant": "a/b"}, {"tenant": 7}, {"aud": "other"}],
)
def test_a_token_that_is_expired_or_for_nobody_is_not_known(signing_key, public_pem, changes):
    token = jwt.encode(_claims(**changes), signing_key, "ES256")
    assert JwtVerifier(public_pem, "ES256", "tenant").identify(token) is None


def test_a_token_for_another_audience_is_not_known(signing_key, public_pem):
    verifier = JwtVerifier(public_pem, "ES256", "tenant", "paceline")
    assert verifier.identify(jwt.encode(_claims(aud="paceline"), signing_key, "ES256")) is not None
    assert verifier.identify(jwt.encode(_claims(aud="other"), signing_key, "ES256")) is None
    assert verifier.identify(jwt.encode(_claims(), signing_key, "ES256")) is None


def test_another_key_or_another_algorithm_does_not_sign(signing_key, public_pem):
    verifier = JwtVerifier(public_pem, "ES256", "tenant")
    assert verifier.identify(jwt.encode(_claims(), ec.generate_private_key(ec.SECP256R1()), "ES256")) is None
    assert verifier.identify(jwt.encode(_claims(), key="x" * 32, algorithm="HS256")) is None
    assert verifier.identify(jwt.encode(_claims(), key="", algorithm="none")) is None
    assert verifier.identify("pl-not-a-token") is None


def test_tokens_without_the_library_are_refused_with_a_remedy(public_pem, monkeypatch):
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(MissingExtra, match="install"):
        JwtVerifier(public_pem, "ES256", "tenant")


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _start(queue: FairQueue, tenant: str, order: list[str]) -> asyncio.Task[None]:
    async def run() -> None:
        await queue.acquire(tenant)
        order.append(tenant)

    return asyncio.create_task(run())


async def test_a_tenant_gets_no_more_places_than_its_limit():
    queue, order = FairQueue(10, 2, 10), []
    tasks = [_start(queue, "a", order) for _ in range(3)]
    await _settle()
    assert order == ["a", "a"]
    queue.release("a")
    await asyncio.gather(*tasks)


async def test_one_tenant_at_its_limit_does_not_stop_another():
    queue = FairQueue(10, 1, 10)
    await queue.acquire("a")
    waiting = _start(queue, "a", [])
    await queue.acquire("b")
    await _settle()
    assert not waiting.done()
    waiting.cancel()


async def test_tenants_take_turns_however_many_calls_one_has():
    queue, order = FairQueue(1, 1, 100), []
    await queue.acquire("x")
    tasks = [_start(queue, tenant, order) for tenant in "aaaabbc"]
    await _settle()
    running = "x"
    for _ in tasks:
        queue.release(running)
        await _settle()
        running = order[-1]
    assert "".join(order) == "abcabaa"


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    queue = FairQueue(10, 1, 1)
    await queue.acquire("a")
    waiting = _start(queue, "a", [])
    await _settle()
    with pytest.raises(errors.Overloaded) as caught:
        await queue.acquire("a")
    assert caught.value.retry_after
    waiting.cancel()


async def test_a_cancelled_call_leaves_the_queue():
    queue, order = FairQueue(1, 1, 2), []
    await queue.acquire("a")
    first, second = _start(queue, "a", order), _start(queue, "a", order)
    await _settle()
    first.cancel()
    await _settle()
    third = _start(queue, "a", order)
    queue.release("a")
    await second
    queue.release("a")
    await third
    assert order == ["a", "a"]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_no_place_is_lost_when_cancellation_and_admission_meet(cancel_first):
    queue = FairQueue(1, 1, 2)
    await queue.acquire("a")
    waiting = _start(queue, "a", [])
    await _settle()
    steps = [waiting.cancel, lambda: queue.release("a")]
    for step in steps if cancel_first else reversed(steps):
        step()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(queue.acquire("b"), 10)

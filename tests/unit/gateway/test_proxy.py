"""Failures that the gateway reports itself, in place of a service."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from gateway.proxy import gateway_error
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

"""Settings that cannot work are refused before anything is sent, by the name of their field and with a remedy."""

import copy
import pickle
from dataclasses import fields
from datetime import UTC, datetime
from fractions import Fraction

import numpy as np
import pytest

from paceline import RetryPolicy, ServiceClient, Timeouts, errors
from paceline.client.training_client import TrainingClient
from paceline.types import LoraConfig, Run, RunState

FIELDS = [(cls, field.name) for cls in (Timeouts, RetryPolicy) for field in fields(cls)]
POSITIVE = [(Timeouts, name) for name in ("training", "sampling", "query", "connect")]
ZERO = [pair for pair in FIELDS if pair not in POSITIVE]
NOT_NUMBERS = [None, "5", True, np.True_, 1j, [5.0]]
NOT_FINITE = [float("nan"), float("inf"), -float("inf"), np.float32("nan")]
ACK_RANGE = "0 or more, and at most 86400 seconds (24 hours)"
TOO_LARGE = [1e300, 10**400, np.float64(1e10)]


def check(caught, kind, field, remedy):
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert f"; give {remedy}" in caught.value.message


@pytest.mark.parametrize("value", ["5", None, 1.0, True, np.True_, [1]])
def test_a_limit_on_calls_in_flight_that_is_no_integer_is_refused(value):
    with pytest.raises(errors.InvalidArgument) as caught:
        ServiceClient(max_in_flight=value)
    check(caught, errors.InvalidArgument, "max_in_flight", "an integer")


@pytest.mark.parametrize("value", [0, -1, np.int64(0)])
def test_a_limit_on_calls_in_flight_below_1_is_refused(value):
    with pytest.raises(errors.OutOfRange) as caught:
        ServiceClient(max_in_flight=value)
    check(caught, errors.OutOfRange, "max_in_flight", "1 or more")


@pytest.mark.parametrize("value", [1, np.int32(7), 10**9])
def test_a_limit_on_calls_in_flight_may_be_any_integer_type(value):
    with ServiceClient("127.0.0.1:1", max_in_flight=value) as client:
        limit = client.transport.connection.max_in_flight
        assert (limit, type(limit)) == (value, int)


@pytest.mark.parametrize("field", ["timeouts", "retry"])
@pytest.mark.parametrize("value", [5, 0, {}, {"query": 5.0}, "30", Timeouts])
def test_settings_of_another_type_are_refused(field, value):
    with pytest.raises(errors.InvalidArgument) as caught:
        ServiceClient(**{field: value})
    check(caught, errors.InvalidArgument, field, {"timeouts": "Timeouts(...)", "retry": "RetryPolicy(...)"}[field])


def test_settings_cannot_be_exchanged():
    with pytest.raises(errors.InvalidArgument, match="timeouts: is of type RetryPolicy"):
        ServiceClient(timeouts=RetryPolicy())
    with pytest.raises(errors.InvalidArgument, match="retry: is of type Timeouts"):
        ServiceClient(retry=Timeouts())


@pytest.mark.parametrize(("cls", "name"), FIELDS)
@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_seconds_that_are_no_number_are_refused(cls, name, value):
    with pytest.raises(errors.InvalidArgument) as caught:
        cls(**{name: value})
    check(caught, errors.InvalidArgument, name, "a number of seconds")


@pytest.mark.parametrize(("cls", "name"), FIELDS)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_seconds_that_are_not_finite_are_refused(cls, name, value):
    with pytest.raises(errors.NonFinite) as caught:
        cls(**{name: value})
    check(caught, errors.NonFinite, name, "0 or more" if (cls, name) in ZERO else "more than 0")


@pytest.mark.parametrize(("cls", "name"), FIELDS)
@pytest.mark.parametrize("value", [-1, -1e-9, np.float32(-3), *TOO_LARGE])
def test_seconds_below_0_or_above_ten_years_are_refused(cls, name, value):
    with pytest.raises(errors.OutOfRange, match=r"at most 315360000 seconds \(10 years\)") as caught:
        cls(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(("cls", "name"), POSITIVE)
def test_an_attempt_or_a_connection_needs_more_than_0_seconds(cls, name):
    with pytest.raises(errors.OutOfRange) as caught:
        cls(**{name: 0})
    check(caught, errors.OutOfRange, name, "more than 0")


@pytest.mark.parametrize(("cls", "name"), ZERO)
def test_closing_and_retries_may_have_0_seconds(cls, name):
    assert getattr(cls(**{name: 0}), name) == 0


@pytest.mark.parametrize(("cls", "name"), FIELDS)
@pytest.mark.parametrize("value", [2, 0.5, np.float32(2), np.float16(2), np.int64(2), Fraction(1, 2), 315_360_000])
def test_seconds_may_be_any_real_number_and_become_a_float(cls, name, value):
    kept = getattr(cls(**{name: value}), name)
    assert (kept, type(kept)) == (float(value), float)


def test_settings_can_be_copied():
    settings = Timeouts(query=2.0), RetryPolicy(budget=0.0)
    assert copy.deepcopy(settings) == pickle.loads(pickle.dumps(settings)) == settings


@pytest.fixture
def training():
    """Yield a training client without a service."""
    run = Run("run", "base", LoraConfig(), 0, 0, 0, RunState.READY, "", datetime.now(UTC), 0)
    with ServiceClient("127.0.0.1:1") as client:
        yield TrainingClient(client.transport, run, attachment=1)


@pytest.mark.parametrize(
    ("value", "kind", "remedy"),
    [
        *[(value, errors.InvalidArgument, "a number of seconds") for value in NOT_NUMBERS],
        *[(value, errors.NonFinite, ACK_RANGE) for value in NOT_FINITE],
        *[(value, errors.OutOfRange, ACK_RANGE) for value in TOO_LARGE],
        *[(value, errors.OutOfRange, ACK_RANGE) for value in (-1, -1e-9, 86401)],
    ],
)
def test_a_wait_for_acknowledgements_that_cannot_be_sent_is_refused(training, value, kind, remedy):
    with pytest.raises(errors.InvalidArgument) as caught:
        training.publish_weights(ack_timeout=value)
    check(caught, kind, "ack_timeout", remedy)

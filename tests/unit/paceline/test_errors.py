"""The error catalog and errors on the wire."""

import re

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import errors
from paceline.errors import CATALOG
from paceline.rpc.status import error_from_details, error_from_rpc, status_code, status_details
from paceline.types import ModelRef
from paceline.types.v1.error_reason_pb2 import ErrorReason
from paceline.weights.wire import absent

PREFIX = "ERROR_REASON_"
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def test_the_catalog_and_the_contract_name_the_same_reasons():
    assert {PREFIX + reason for reason in CATALOG} == set(ErrorReason.keys()) - {PREFIX + "UNSPECIFIED"}


def test_every_class_is_documented_and_has_its_own_reason():
    assert all(cls.__doc__ and cls.reason == reason for reason, cls in CATALOG.items())


@pytest.mark.parametrize("cls", CATALOG.values(), ids=CATALOG)
def test_every_class_has_a_status_code(cls):
    assert status_code(cls("wrong")).value[0] == cls.code


@settings(deadline=None)
@given(
    st.sampled_from(sorted(CATALOG)),
    TEXT,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=3),
    st.none() | st.integers(0, 10_000).map(lambda milliseconds: milliseconds / 1000),
)
def test_an_error_comes_back_as_it_was_raised(reason, message, field, metadata, retry_after):
    sent = CATALOG[reason](message, field=field, metadata=metadata, retry_after=retry_after)
    received = error_from_details(status_details(sent), str(sent))
    assert type(received) is type(sent)
    assert (received.message, received.field, received.metadata) == (sent.message, sent.field, sent.metadata)
    assert received.retry_after == pytest.approx(sent.retry_after)


def test_a_reason_of_a_newer_service_comes_back_as_the_nearest_class():
    class Newer(errors.InvalidArgument):
        reason = "FROM_THE_FUTURE"

    received = error_from_details(status_details(Newer("wrong", field="rank")), "wrong")
    assert type(received) is errors.InvalidArgument
    assert received.field == "rank"


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UpstreamUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.TimedOut),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unsupported),
        (grpc.StatusCode.UNKNOWN, errors.Internal),
    ],
)
def test_a_failure_of_grpc_itself_has_a_class_too(code, cls):
    failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="broken")
    error = error_from_rpc(failure)
    assert type(error) is cls
    assert str(error) == "broken"


def test_the_text_of_an_error_begins_with_its_field():
    assert str(errors.OutOfRange("is 0; use 1 or more", field="rank")) == "rank: is 0; use 1 or more"


RUN = "run-" + "0" * 32


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (absent(ModelRef(run_id=RUN, version=3)), r"get_run tells the newest .*save_weights_for_sampler keeps"),
        (absent(ModelRef(checkpoint=f"paceline://{RUN}/sampler/a")), "/sampler/a; .*ttl_seconds.*list_checkpoints"),
        (errors.RunNotFound.of(RUN, "run_id"), "list_runs returns"),
        (errors.RunNotFound.deleted("run_id"), "list_runs returns"),
        (errors.VersionNotFound.unpublished("version"), "publish_weights"),
        (errors.ModelNotFound.of("tiny", "base_model"), "give that name, or none"),
    ],
    ids=lambda value: getattr(value, "reason", ""),
)
def test_what_is_not_found_is_told_with_what_to_do(error, told):
    assert re.search(told, error.message)

"""Limits of single tenants: their file, and how they travel to the services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.tenants import Tenants
from paceline import errors
from paceline.cli import main
from paceline.files.tenants_file import change_limits, read_tenants
from paceline.requests.tenant_limits import MAX_LIMIT, SETTINGS, HeardLimits, as_text, from_text
from paceline.rpc.identity import LIMITS_KEY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


def test_limits_are_set_and_removed_one_by_one(file):
    assert change_limits(file, "team-a", {"runs": 8, "tokens": 0}) == {"runs": 8, "tokens": 0}
    change_limits(file, "team-b", {"runs": 1})
    assert change_limits(file, "team-a", {"calls": 3}, frozenset({"runs"})) == {"tokens": 0, "calls": 3}
    assert change_limits(file, "team-b", {}, frozenset({"runs"})) == {}
    assert read_tenants(file) == {"team-a": {"tokens": 0, "calls": 3}}


@pytest.mark.parametrize("limits", [{"runns": 8}, {"runs": -1}, {"runs": 1.5}, {"runs": True}, {"runs": MAX_LIMIT + 1}])
def test_a_wrong_limit_is_refused_and_the_file_stays(file, limits):
    change_limits(file, "team-a", {"runs": 8})
    with pytest.raises(errors.InvalidArgument) as caught:
        change_limits(file, "team-a", limits)
    assert caught.value.field == next(iter(limits))
    assert read_tenants(file) == {"team-a": {"runs": 8}}
    file.write_text(json.dumps({"team-a": limits}))
    with pytest.raises(errors.InvalidArgument, match="team-a"):
        read_tenants(file)


def test_an_unknown_quota_is_told_those_that_there_are(file):
    with pytest.raises(errors.InvalidArgument, match=", ".join(SETTINGS)):
        change_limits(file, "team-a", {"runns": 8})
    with pytest.raises(errors.InvalidArgument, match="must be 1 to 64 characters"):
        change_limits(file, "team a", {"runs": 8})


@pytest.mark.parametrize("text", ["", "[]", '{"team a": {}}', '{"team-a": []}', "[" * 100_000])
def test_a_file_of_another_shape_is_refused(file, text):
    file.write_text(text)
    with pytest.raises(errors.InvalidArgument) as caught:
        read_tenants(file)
    assert caught.value.field == "tenants_file"


def test_the_gateway_tells_limits_with_each_call_and_sees_changes(file):
    tenants = Tenants(file, "secret")
    assert dict(tenants.metadata("team-a"))[LIMITS_KEY] == ""
    change_limits(file, "team-a", {"runs": 8, "volume_bytes": 50})
    assert dict(tenants.metadata("team-a"))[LIMITS_KEY] == "runs=8,volume_bytes=50"
    assert tenants.limits.of("team-a", "runs", 64) == 8
    assert tenants.limits.of("team-b", "runs", 64) == 64
    file.write_text("torn")
    with capture_logs() as logged:
        assert dict(tenants.metadata("team-a"))[LIMITS_KEY] == "runs=8,volume_bytes=50"
    assert [entry["log_level"] for entry in logged] == ["error"]
    file.unlink()
    assert dict(tenants.metadata("team-a"))[LIMITS_KEY] == ""


def test_a_service_knows_what_it_was_told_last():
    heard = HeardLimits()
    heard.hear("team-a", "runs=8,tokens=0")
    assert [heard.of("team-a", name, 64) for name in ("runs", "tokens", "calls")] == [8, 0, 64]
    assert heard.of("team-b", "runs", 64) == 64
    assert heard.raised_by("team-a", "runs") == "this tenant's limit `runs` (`paceline keys quota`)"
    assert heard.raised_by("team-a", "calls") == "max_in_flight_per_tenant"
    heard.hear("team-a", "runs=9")
    assert [heard.of("team-a", name, 64) for name in ("runs", "tokens")] == [9, 64]
    heard.hear("team-a", "")
    assert heard.of("team-a", "runs", 64) == 64


def test_what_is_sent_is_read_and_what_nobody_knows_left_out():
    limits = {name: number for number, name in enumerate(SETTINGS)}
    assert from_text(as_text(limits)) == limits
    assert from_text("runs=8,later=5,runs,=,calls=x,tokens=9999999999999999999") == {"runs": 8, "tokens": MAX_LIMIT}


def test_the_command_sets_and_shows_limits(file, capsys):
    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        return main(["keys", "quota", *arguments, "--file", str(file)]), capsys.readouterr().out

    status, out = run("team-a", "runs=8", "volume_bytes=50G", "--json")
    assert (status, json.loads(out)["limits"]) == (0, {"runs": 8, "volume_bytes": 50_000_000_000})
    assert json.loads(run("team-a", "runs-", "--json")[1])["limits"] == {"volume_bytes": 50_000_000_000}
    assert "max_volume_bytes_per_tenant" in run("team-a")[1]
    assert run("team-a", "runs")[0] == run("team-a", "runs=many")[0] == 2
    assert run("team-a", "runns=8")[0] == 1

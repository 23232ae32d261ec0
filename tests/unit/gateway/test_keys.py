"""API keys: who is admitted, and what the file reveals."""

from __future__ import annotations

import json
import os
import resource
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway.keys import KeyRing
from gateway.metrics import add_key_metrics
from paceline import errors
from paceline.files.api_keys import PREFIX, read_keys
from paceline.files.key_changes import add_key, expire_key, remove_key, rotate_key
from paceline.rpc.identity import Identity


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_known_by_its_tenant_and_name(keys_file):
    keys = [add_key(keys_file, f"team-{n}", f"key-{n}") for n in range(3)]
    ring = KeyRing(keys_file)
    assert [ring.identify(key) for key in keys] == [Identity(f"team-{n}", f"key-{n}") for n in range(3)]


@pytest.mark.parametrize(
    "change", [lambda key: "", lambda key: key[:-1], lambda key: key + "x", lambda key: key.upper()]
)
def test_what_is_not_exactly_a_key_is_not_known(keys_file, change):
    key = add_key(keys_file, "team-a", "laptop")
    assert KeyRing(keys_file).identify(change(key)) is None


def test_the_stored_hash_is_not_a_key(keys_file):
    add_key(keys_file, "team-a", "laptop")
    assert KeyRing(keys_file).identify(read_keys(keys_file)[0].sha256) is None


def test_the_file_holds_no_key_and_is_private(keys_file):
    key = add_key(keys_file, "team-a", "laptop")
    assert key.startswith(PREFIX)
    assert key not in keys_file.read_text()
    assert key.removeprefix(PREFIX) not in keys_file.read_text()
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    assert {path.name for path in keys_file.parent.iterdir()} == {"keys.json", ".secrets.lock"}


def test_changes_of_the_file_are_seen(keys_file):
    first = add_key(keys_file, "team-a", "laptop")
    ring = KeyRing(keys_file)
    second = add_key(keys_file, "team-b", "cluster")
    assert ring.identify(second) == Identity("team-b", "cluster")
    remove_key(keys_file, "laptop")
    assert ring.identify(first) is None
    assert ring.identify(second) is not None


@pytest.mark.parametrize("text", ["", "[{", "{}", '""', "null", "[" * 100_000])
def test_an_unusable_file_leaves_the_keys_as_they_were(keys_file, text):
    key = add_key(keys_file, "team-a", "laptop")
    ring = KeyRing(keys_file)
    keys_file.write_text(text)
    assert ring.identify(key) is not None
    keys_file.unlink()
    assert ring.identify(key) is not None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_is_not_waited_for(keys_file, make):
    key = add_key(keys_file, "team-a", "laptop")
    ring = KeyRing(keys_file)
    keys_file.unlink()
    make(keys_file)
    found: list[Identity | None] = []
    identified = Thread(target=lambda: found.append(ring.identify(key)), daemon=True)
    identified.start()
    identified.join(10)
    assert found == [Identity("team-a", "laptop")]


def test_a_link_is_followed_as_kubernetes_secrets_are_links(keys_file):
    key = add_key(keys_file, "team-a", "laptop")
    link = keys_file.with_name("link.json")
    link.symlink_to(keys_file.name)
    assert KeyRing(link).identify(key) == Identity("team-a", "laptop")


def test_a_removed_key_is_refused_although_the_first_reading_after_its_removal_failed(keys_file):
    key = add_key(keys_file, "team-a", "laptop")
    ring = KeyRing(keys_file)
    remove_key(keys_file, "laptop")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # no further file can be opened
    try:
        with capture_logs() as logged:
            assert [ring.identify(key) is not None for _ in range(3)] == [True] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [entry["log_level"] for entry in logged] == ["error"]
    assert ring.identify(key) is None


def test_a_change_is_seen_that_leaves_size_and_time_of_modification(keys_file):
    key = add_key(keys_file, "team-a", "laptop")
    ring, before = KeyRing(keys_file), keys_file.stat()
    keys_file.write_text(keys_file.read_text().replace("team-a", "team-b"))
    while keys_file.stat().st_ctime_ns == before.st_ctime_ns or keys_file.stat().st_mtime_ns != before.st_mtime_ns:
        os.utime(keys_file, ns=(before.st_atime_ns, before.st_mtime_ns))  # until the kernel's clock has moved on
    assert ring.identify(key) == Identity("team-b", "laptop")


def test_mode_owner_and_group_of_the_file_are_kept(keys_file):
    """A user other than root can only give a file to its own groups."""
    add_key(keys_file, "team-a", "laptop")
    owner = (10001, 10001) if os.geteuid() == 0 else (os.geteuid(), [os.getegid(), *os.getgroups()][-1])
    os.chown(keys_file, *owner)
    keys_file.chmod(0o640)
    add_key(keys_file, "team-a", "cluster")
    for name, mode in (("keys.json", 0o640), (".secrets.lock", 0o600)):
        status = (keys_file.parent / name).stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (*owner, mode)


def test_commands_at_the_same_time_lose_no_change(keys_file):
    add_key(keys_file, "team-a", "old")
    names = {f"key-{number}" for number in range(16)}
    with ThreadPoolExecutor(17) as pool:
        changes = [pool.submit(remove_key, keys_file, "old")]
        changes += [pool.submit(add_key, keys_file, "team-a", name) for name in names]
        for change in changes:
            change.result()
    assert {key.name for key in read_keys(keys_file)} == names


def test_a_folder_that_does_not_exist_is_named(keys_file):
    with pytest.raises(errors.InvalidArgument, match="nowhere does not exist; make this folder"):
        add_key(keys_file.parent / "nowhere" / "keys.json", "team-a", "laptop")


@pytest.mark.parametrize("text", ["", "{}", "[]", '["x"]', '[{"name": "a"}]', "[1]"])
def test_a_gateway_does_not_start_on_a_file_without_keys(keys_file, text):
    keys_file.write_text(text)
    with pytest.raises(errors.InvalidArgument) as caught:
        KeyRing(keys_file)
    assert caught.value.field == "keys_file"


def test_a_missing_file_is_named(keys_file):
    with pytest.raises(errors.InvalidArgument, match=r"keys\.json"):
        KeyRing(keys_file)


@pytest.mark.parametrize("bad", [{"tenant": ""}, {"tenant": "a b"}, {"tenant": 3}, {"name": ""}, {"sha256": "ab"}])
def test_a_bad_entry_is_refused(keys_file, bad):
    add_key(keys_file, "team-a", "laptop")
    entry = json.loads(keys_file.read_text())[0] | bad
    keys_file.write_text(json.dumps([entry]))
    with pytest.raises(errors.InvalidArgument) as caught:
        read_keys(keys_file)
    assert caught.value.field == next(iter(bad))


def test_names_are_unique(keys_file):
    add_key(keys_file, "team-a", "laptop")
    with pytest.raises(errors.InvalidArgument, match="laptop"):
        add_key(keys_file, "team-b", "laptop")
    assert len(read_keys(keys_file)) == 1


def test_an_expired_key_is_refused_with_when_it_expired(keys_file):
    key = add_key(keys_file, "team-a", "laptop", timedelta(hours=1))
    ring = KeyRing(keys_file)
    identity = ring.identify(key)
    assert ring.still_admits(identity)
    ended = expire_key(keys_file, "laptop", timedelta())
    with pytest.raises(errors.ApiKeyExpired, match="laptop expired at 20") as caught:
        ring.identify(key)
    assert datetime.fromisoformat(caught.value.metadata["expired"]) == ended
    assert not ring.still_admits(identity)
    expire_key(keys_file, "laptop", None)
    assert ring.identify(key) == identity


def test_a_key_that_expires_within_seven_days_is_logged_once_when_it_is_used(keys_file):
    soon = add_key(keys_file, "team-a", "laptop", timedelta(days=6))
    later = add_key(keys_file, "team-a", "cluster", timedelta(days=8))
    ring = KeyRing(keys_file)
    with capture_logs() as logged:
        for _ in range(3):
            assert ring.identify(soon)
            assert ring.identify(later)
    assert [(entry["log_level"], entry["key"]) for entry in logged] == [("warning", "laptop")]


def test_the_times_of_last_use_are_those_of_keys_in_the_file(keys_file):
    key = add_key(keys_file, "team-a", "laptop")
    add_key(keys_file, "team-b", "never-used")
    ring, begun = KeyRing(keys_file), time.time()
    registry = CollectorRegistry()
    add_key_metrics(ring, registry)
    ring.identify(key)
    value = partial(registry.get_sample_value, "paceline_gateway_key_last_use_seconds")
    assert begun <= value({"tenant": "team-a", "key": "laptop"}) <= time.time()
    assert value({"tenant": "team-b", "key": "never-used"}) is None
    remove_key(keys_file, "laptop")
    ring.identify("another")
    assert value({"tenant": "team-a", "key": "laptop"}) is None


def test_both_keys_are_valid_while_one_is_rotated(keys_file):
    old = add_key(keys_file, "team-a", "laptop")
    add_key(keys_file, "team-b", "cluster")
    ring = KeyRing(keys_file)
    new = rotate_key(keys_file, "laptop", timedelta(hours=1))
    assert ring.identify(old) == ring.identify(new) == Identity("team-a", "laptop")
    expiries = [key.expires for key in read_keys(keys_file) if key.name == "laptop"]
    assert expiries[1] is None
    assert timedelta() < expiries[0] - datetime.now(UTC) <= timedelta(hours=1)
    newest = rotate_key(keys_file, "laptop", timedelta())
    assert ring.identify(old) is ring.identify(new) is None
    assert ring.identify(newest) == Identity("team-a", "laptop")
    assert len(read_keys(keys_file)) == 2


def test_a_rotation_prolongs_no_older_key_and_keeps_the_lifetime(keys_file):
    add_key(keys_file, "team-a", "laptop", timedelta(days=2))
    rotate_key(keys_file, "laptop", timedelta(hours=1))
    rotate_key(keys_file, "laptop", timedelta(days=9))
    first, second, third = read_keys(keys_file)
    assert first.expires - first.created <= timedelta(hours=1, seconds=9)
    assert second.expires - second.created == third.expires - third.created == timedelta(days=2)


def test_a_lifetime_that_nobody_knows_has_to_be_given(keys_file):
    add_key(keys_file, "team-a", "laptop", timedelta(days=2))
    (entry,) = json.loads(keys_file.read_text())
    del entry["created"]
    keys_file.write_text(json.dumps([entry]))
    with pytest.raises(errors.InvalidArgument, match="give the lifetime"):
        rotate_key(keys_file, "laptop", timedelta(hours=1))
    rotate_key(keys_file, "laptop", timedelta(hours=1), timedelta(days=3))
    assert read_keys(keys_file)[0].created is None


def test_a_removal_removes_what_a_rotation_left(keys_file):
    add_key(keys_file, "team-a", "laptop")
    rotate_key(keys_file, "laptop", timedelta(hours=1))
    remove_key(keys_file, "laptop")
    assert read_keys(keys_file) == ()
    for change in (remove_key, partial(rotate_key, grace=timedelta()), partial(expire_key, after=None)):
        with pytest.raises(errors.InvalidArgument, match="no key is named laptop"):
            change(keys_file, "laptop")


@pytest.mark.parametrize("time", ["tomorrow", "2026-01-31", "2026-01-31T12:00:00", 5, "2026-13-31T12:00:00Z"])
def test_a_date_that_is_no_time_with_a_zone_is_refused(keys_file, time):
    add_key(keys_file, "team-a", "laptop")
    entry = json.loads(keys_file.read_text())[0] | {"expires": time}
    keys_file.write_text(json.dumps([entry]))
    with pytest.raises(errors.InvalidArgument, match="expires is not a time such as"):
        read_keys(keys_file)


@pytest.mark.parametrize("change", [{"expires": None}, {"tenant": "team-b"}])
def test_two_keys_of_a_name_are_refused_unless_a_rotation_left_them(keys_file, change):
    add_key(keys_file, "team-a", "laptop")
    rotate_key(keys_file, "laptop", timedelta(hours=1))
    entries = json.loads(keys_file.read_text())
    keys_file.write_text(json.dumps([entries[0] | change, entries[1]]))
    with pytest.raises(errors.InvalidArgument, match="two keys with the name laptop"):
        read_keys(keys_file)

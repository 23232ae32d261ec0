"""Secrets are on the disk whole or not at all, whatever stops their writer, and an empty one opens nothing."""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Thread

import pytest
from structlog.testing import capture_logs
from support.certificates import make_pem
from support.stacks.deploy_files import ROOT

from gateway.admission import JwtVerifier
from gateway.http.tinker.downloads import read_or_make_secret
from gateway.keys import KeyRing
from gateway.settings import GatewaySettings
from paceline import ServiceClient, errors
from paceline.files.api_keys import PREFIX, hash_token, read_keys, update_keys
from paceline.files.key_changes import add_key, remove_key
from paceline.files.secret_files import read_secret
from paceline.rpc.channel import TlsFiles, open_channel
from paceline.settings import settings_of
from paceline.up.plan import CannotStart, read_or_make_key

BLANK = ["", "\n", " \t\r\n", " " * 64]
MAKE_SECRETS = ROOT / "scripts" / "make_secrets.py"


def make_secrets(directory: Path) -> None:
    runpy.run_path(str(MAKE_SECRETS))["make_secrets"](directory)


@dataclass(frozen=True)
class Writer:
    """Something that writes secrets below a folder."""

    write: Callable[[Path], object]
    before: Callable[[Path], object] = lambda _: None
    """What was there first."""


WRITERS = {
    "up": Writer(read_or_make_key),
    "up with the keys of others": Writer(
        read_or_make_key, lambda folder: add_key(folder / "keys.json", "team", "laptop")
    ),
    "make_secrets": Writer(make_secrets),
    "add": Writer(lambda folder: add_key(folder / "keys.json", "team", "laptop")),
    "add another": Writer(
        lambda folder: add_key(folder / "keys.json", "team", "laptop"),
        lambda folder: add_key(folder / "keys.json", "team", "desktop"),
    ),
    "remove": Writer(
        lambda folder: remove_key(folder / "keys.json", "laptop"),
        lambda folder: (
            add_key(folder / "keys.json", "team", "laptop"),
            add_key(folder / "keys.json", "team", "desktop"),
        ),
    ),
    "signing key": Writer(lambda folder: read_or_make_secret(folder / "downloads.secret")),
}


@pytest.fixture(params=WRITERS)
def writer(request) -> Writer:
    return WRITERS[request.param]


def secrets_below(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if not path.name.startswith(".")}


def assert_whole(folder: Path) -> None:
    for name, content in secrets_below(folder).items():
        if name.endswith("keys.json"):
            assert read_keys(folder / name)
        elif name.endswith(".secret"):
            assert len(content) == 32
        else:
            assert read_secret(folder / name)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file have a byte, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def ends_at_rename(write: Callable[[], object], number: int) -> bool:
    """Run `write` in a process that is killed just before its n-th rename; return whether it was."""
    left = number

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal left
        if event == "os.rename":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            sys.addaudithook(hook)
            write()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in {0, signal.SIGKILL}
    return status == signal.SIGKILL


def test_a_full_disk_leaves_what_was_there_and_no_empty_secret(writer, tmp_path):
    writer.before(tmp_path)
    before = secrets_below(tmp_path)
    with (
        full_disk(),
        pytest.raises((CannotStart, errors.InvalidArgument, errors.Unavailable, OSError), match="too large"),
    ):
        writer.write(tmp_path)
    assert secrets_below(tmp_path) == before
    writer.write(tmp_path)
    assert_whole(tmp_path)


def test_a_crash_before_a_rename_leaves_no_torn_secret_and_the_next_try_succeeds(writer, tmp_path):
    for number in range(1, 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        writer.before(folder)
        killed = ends_at_rename(lambda folder=folder: writer.write(folder), number)
        assert_whole(folder)
        if not killed:
            assert number > 1
            break
        writer.write(folder)
        assert_whole(folder)
        assert not list(folder.rglob(".*.new"))
    else:
        raise AssertionError("it never ended")


def test_a_first_start_that_was_killed_is_made_up_for(tmp_path):
    for number in (1, 2, 3):
        state = tmp_path / f"up-{number}"
        state.mkdir()
        assert ends_at_rename(lambda state=state: read_or_make_key(state), number)
        key = read_secret(read_or_make_key(state))
        assert KeyRing(state / "keys.json").identify(key)
        directory = tmp_path / f"secrets-{number}"
        assert ends_at_rename(lambda directory=directory: make_secrets(directory), number)
        make_secrets(directory)
        assert KeyRing(directory / "keys" / "keys.json").identify(read_secret(directory / "api_key"))


def test_secrets_are_private_and_synced_with_their_folder(writer, tmp_path, monkeypatch):
    writer.before(tmp_path)
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_mode), sync(file)))
    writer.write(tmp_path)
    files, folders = [mode for mode in synced if stat.S_ISREG(mode)], [mode for mode in synced if stat.S_ISDIR(mode)]
    assert len(files) == len(folders) > 0
    shared = writer is WRITERS["make_secrets"]  # the mode of their folder keeps others out
    for name in secrets_below(tmp_path):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == (0o644 if shared else 0o600)


def test_a_start_and_a_new_key_at_the_same_time_lose_nothing(tmp_path):
    keys_file = tmp_path / "keys.json"
    starting = Thread(target=read_or_make_key, args=(tmp_path,))

    def add(keys):
        starting.start()
        starting.join(0.5)  # it ends now only if it does not wait for this change
        return (*keys, *others)

    others = read_keys(_other_keys(tmp_path / "other"))
    update_keys(keys_file, add)
    starting.join()
    assert {key.name for key in read_keys(keys_file)} == {"up", "laptop"}


def _other_keys(folder: Path) -> Path:
    folder.mkdir()
    add_key(folder / "keys.json", "team", "laptop")
    return folder / "keys.json"


@pytest.mark.parametrize("blank", BLANK)
def test_an_empty_key_or_credential_starts_nothing_on_one_machine(tmp_path, blank):
    for name in ("api_key", "credential"):
        state = tmp_path / name
        read_or_make_key(state)
        (state / name).write_text(blank)
        with pytest.raises(CannotStart, match=rf"{name} is empty; remove it, and the next start makes a new one"):
            read_or_make_key(state)
        assert all(key.sha256 != hash_token("") for key in read_keys(state / "keys.json"))


@pytest.mark.parametrize(("name", "blank"), [("credential", ""), ("api_key", " \n")])
def test_an_empty_secret_of_a_deployment_is_refused(tmp_path, name, blank):
    (tmp_path / name).write_text(blank)
    done = subprocess.run([sys.executable, MAKE_SECRETS, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"{name} is empty; remove it" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "keys" / "keys.json").exists()


@pytest.mark.parametrize("empty", ["", " ", "\n", "\r\n", "\t", PREFIX])
def test_the_hash_of_no_key_is_refused_and_admits_nobody(tmp_path, empty):
    keys_file = tmp_path / "keys.json"
    key = add_key(keys_file, "team", "laptop")
    ring = KeyRing(keys_file)
    entry = {"name": "open", "tenant": "team", "sha256": sha256(empty.encode()).hexdigest()}
    keys_file.write_text(json.dumps([*json.loads(keys_file.read_text()), entry]))
    with capture_logs() as logged:
        assert ring.identify(empty) is None
        assert ring.identify(key) is not None  # the keys from before stay valid
    assert [line["log_level"] for line in logged] == ["error"]
    with pytest.raises(errors.InvalidArgument, match="key open is that of an empty key"):
        KeyRing(keys_file)
    for change in (lambda: add_key(keys_file, "team", "desktop"), lambda: read_or_make_key(tmp_path)):
        with pytest.raises((errors.InvalidArgument, CannotStart), match="empty key"):
            change()


@pytest.mark.parametrize("blank", BLANK)
def test_certificates_and_public_keys_that_are_empty_are_refused(tmp_path, blank):
    empty = tmp_path / "empty.pem"
    empty.write_text(blank)
    pem = make_pem(tmp_path, "pem").cert
    with pytest.raises(errors.InvalidArgument, match=r"empty\.pem holds no public key for RS256"):
        JwtVerifier(empty, "RS256", "tenant")
    for name in ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "UPSTREAM_TLS_CA", "UPSTREAM_TLS_CERT", "UPSTREAM_TLS_KEY"):
        area = name.partition("TLS")[0]
        files = dict.fromkeys(
            [f"{area}TLS_{file}" for file in ("CERT", "KEY", "CA" if area else "CLIENT_CA")],
            str(pem),
        )
        environment = {f"PACELINE_GATEWAY_{key}": value for key, value in (files | {name: str(empty)}).items()}
        with pytest.raises(SystemExit, match=rf"{name.lower()}: .*empty\.pem is not a PEM file"):
            settings_of(GatewaySettings, {"PACELINE_GATEWAY_INSECURE": "true"} | environment)
    with pytest.raises(errors.InvalidArgument, match=r"is not a PEM file") as caught:
        ServiceClient(tls_ca=empty)
    assert caught.value.field == "tls_ca"


async def test_a_channel_never_takes_an_empty_file_for_the_systems_authorities(tmp_path):
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ValueError, match="is not a PEM file"):
        open_channel("127.0.0.1:1", TlsFiles(tmp_path / "empty.pem"))


def test_a_certificate_for_calls_that_would_be_plaintext_is_refused(tmp_path):
    pem = str(make_pem(tmp_path, "pem").cert)
    given = {"INSECURE": "true", "UPSTREAM_TLS_CERT": pem, "UPSTREAM_TLS_KEY": pem}
    with pytest.raises(SystemExit, match="upstream_tls_cert needs upstream_tls_ca"):
        settings_of(GatewaySettings, {f"PACELINE_GATEWAY_{name}": value for name, value in given.items()})


@pytest.mark.parametrize("blank", BLANK)
def test_a_client_refuses_an_empty_key_and_empty_authorities(monkeypatch, blank):
    for field, arguments in (("api_key", {"api_key": blank}), ("tls_ca", {"tls_ca": blank})):
        with pytest.raises(errors.InvalidArgument, match="is empty") as caught:
            ServiceClient(**arguments)
        assert caught.value.field == field
    for variable in ("PACELINE_API_KEY", "PACELINE_TLS_CA"):
        with monkeypatch.context() as context, pytest.raises(errors.InvalidArgument, match="is empty") as caught:
            context.setenv(variable, blank)
            ServiceClient()
        assert caught.value.field == variable


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 32, b"\n" * 64])
def test_a_signing_key_that_anybody_could_guess_is_refused(tmp_path, content):
    (tmp_path / "downloads.secret").write_bytes(content)
    with pytest.raises(errors.InvalidArgument, match=r"downloads\.secret is not a secret.*remove it"):
        read_or_make_secret(tmp_path / "downloads.secret")

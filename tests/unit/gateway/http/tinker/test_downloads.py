"""What a signed URL opens, for how long, and for whom it counts."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from starlette.requests import Request
from support.clocks import FakeMachine

from gateway.http.problems import problem
from gateway.http.tinker.downloads import ARCHIVE, Downloads
from gateway.keys import KeyRing
from paceline import errors
from paceline.files.key_changes import add_key, remove_key
from paceline.layout import CheckpointPath, new_run_id
from paceline.types import CheckpointKind

PATH = CheckpointPath(new_run_id(), CheckpointKind.SAMPLER, "mine")
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def machine():
    return FakeMachine()


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.json"
    for tenant in ("mine", "other"):
        add_key(file, tenant, f"key of {tenant}".replace(" ", "-"))
    return file


def token_of(keys, tenant):
    """Give the tenant another key and return it."""
    return add_key(keys, tenant, f"{tenant}-laptop")


@pytest.fixture
def ring(keys):
    return KeyRing(keys)


@pytest.fixture
def downloads(ring, machine):
    return Downloads(None, b"secret", "https://host", [ring], machine.machine())


def url(downloads, identity, file=FILES[0]):
    request = Request({"type": "http", "headers": [], "server": ("host", 1), "path": "/", "scheme": "http"})
    return urlsplit(downloads.address(request, identity, PATH, file)[0]).path


def is_open(downloads, path):
    try:
        return downloads.identify(path).tenant
    except errors.MethodNotAllowed:
        return ""


def test_a_url_opens_the_file_that_it_names_and_no_other(downloads, keys, ring):
    identity = ring.identify(token_of(keys, "mine"))
    one = url(downloads, identity)
    assert is_open(downloads, one) == "mine"
    for other in (FILES[1], ARCHIVE, "", f"{FILES[0]}/x"):
        assert not is_open(downloads, one.replace(FILES[0], other))
    assert not is_open(downloads, url(downloads, identity, ARCHIVE).replace(ARCHIVE, FILES[0]))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_url_dies_with_the_key_that_asked_for_it(downloads, keys, ring, is_replaced):
    one = url(downloads, ring.identify(token_of(keys, "mine")))
    assert is_open(downloads, one)
    remove_key(keys, "mine-laptop")
    if is_replaced:
        token_of(keys, "mine")
    assert not is_open(downloads, one)


def test_a_url_expires_by_the_time_that_passes_and_not_by_the_clock(downloads, keys, ring, machine):
    one = url(downloads, ring.identify(token_of(keys, "mine")))
    machine.wall += 1_000_000
    assert is_open(downloads, one)
    machine.wall -= 2_000_000
    machine.pass_time(3_599)
    assert is_open(downloads, one)
    machine.pass_time(1)
    assert not is_open(downloads, one)


def test_a_url_is_of_one_boot_of_the_machine(downloads, keys, ring, machine):
    one = url(downloads, ring.identify(token_of(keys, "mine")))
    machine.reboot(seconds_off=10)
    assert not is_open(Downloads(None, b"secret", "", [ring], machine.machine()), one)


async def test_a_tenant_has_so_many_downloads_and_others_have_their_own(downloads, keys, ring, monkeypatch):
    monkeypatch.setattr("gateway.http.tinker.downloads.MOST_DOWNLOADS", 2)

    async def files(tenant, path):
        raise errors.CheckpointNotFound("no such checkpoint")

    monkeypatch.setattr(downloads, "files", files)
    app = FastAPI()
    app.include_router(downloads.routes(), prefix="/api/v1")
    app.add_exception_handler(errors.PacelineError, lambda request, error: problem(error, request.url.path))
    mine, other = (url(downloads, ring.identify(token_of(keys, tenant))) for tenant in ("mine", "other"))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://host") as client:
        with downloads.counted("mine"), downloads.counted("mine"):
            refused = await client.get(mine)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await client.get(other)).status_code == 404
        assert (await client.get(mine)).status_code == 404

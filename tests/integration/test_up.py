"""`paceline up` with the real services, and `local_services`, which runs it for scripts and notebooks."""

from __future__ import annotations

import socket

import psutil
import pytest
from support.descendants import descendants
from support.models.tiny_models import make_tiny_llama
from support.ports import free_service_ports

import paceline
from paceline.up.local import local_services
from paceline.up.plan import CannotStart, UpOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("up") / "tiny")


def options_for(model, tmp_path):
    address = f"127.0.0.1:{free_service_ports()}"
    return UpOptions(str(model), state=str(tmp_path / "state"), address=address, engine="hf", max_lora_rank=8)


def test_services_come_up_in_few_lines_serve_and_leave_nothing_behind(model, tmp_path):
    options, said = options_for(model, tmp_path), []
    others = descendants()  # processes that other tests of this process keep
    with local_services(options, tmp_path / "up.log", said.append) as services:
        assert len(said) <= 6
        assert said[-1].startswith("Paceline is up")
        with paceline.ServiceClient(services.address, services.api_key) as client:
            assert client.get_server_capabilities().supported_models
        started = set(descendants("_service") + descendants("gateway")).difference(others)
        assert len(started) >= 3
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)
    assert {path.name for path in (tmp_path / "state" / "logs").iterdir()} == {
        "trainer.log",
        "sampler.log",
        "gateway.log",
    }


def test_services_that_cannot_start_are_an_error_with_the_reason(model, tmp_path):
    options = options_for(model, tmp_path)
    host, _, port = options.address.rpartition(":")
    # Another process that listens there is not mistaken for one of the services.
    taken = socket.create_server((host, int(port)))
    reason = f"another process listens on {options.address}"
    with taken, pytest.raises(CannotStart, match=reason), local_services(options, tmp_path / "up.log"):
        pass
    assert not descendants("paceline.cli")

"""Trouble of the HTTP APIs' state and port: gRPC is served without them, and they come back once it is over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from support.patience import PATIENCE
from support.stacks.gateway_stack import free_port

from paceline.gateway.v1 import gateway_service_pb2 as pb


class Gateway:
    """A running gateway, whose services do not run."""

    def __init__(self, state: Path) -> None:
        self.grpc, self.http, self.metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
        flags = {"listen": self.grpc, "http-listen": self.http, "metrics-listen": self.metrics, "http-state": state}
        flags |= {"health-listen": "127.0.0.1:0"}
        flags |= {name: f"127.0.0.1:{free_port()}" for name in ("trainer", "samplers")}
        self._command = [sys.executable, "-m", "paceline.services", "gateway", "--insecure"]
        self._command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]

    @contextmanager
    def running(self):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in [*sys.path, str(Path.cwd())] if path)
        process = subprocess.Popen(self._command, env=environment)
        try:
            self.call()
            yield self
            self.call()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0

    def call(self) -> None:
        """Call it over gRPC."""
        with grpc.insecure_channel(self.grpc) as channel:
            channel.unary_unary("/paceline.gateway.v1.GatewayService/WhoAmI")(
                pb.WhoAmIRequest().SerializeToString(), wait_for_ready=True, timeout=PATIENCE
            )

    def open_session(self) -> httpx.Response:
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.24", "type": "create_session"}
        return httpx.post(f"http://{self.http}/api/v1/create_session", json=body, timeout=PATIENCE)

    def refusal(self) -> str:
        """Return why HTTP is out."""
        assert httpx.get(f"http://{self.http}/health").status_code == 503
        assert self.is_out()
        chat = httpx.post(f"http://{self.http}/v1/chat/completions", json={})
        assert (chat.status_code, chat.json()["error"]["type"]) == (503, "server_error")
        answer = self.open_session()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "HTTP_STATE_UNUSABLE"
        return answer.json()["detail"]

    def is_out(self) -> bool:
        return "paceline_gateway_http_out 1.0" in httpx.get(f"http://{self.metrics}/metrics").text

    def comes_back(self) -> None:
        until(lambda: self.open_session().status_code == 200 and not self.is_out())


def until(holds) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def disk(folder: Path, options: str):
    """Mount a small disk."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a disk up with a file."""
    filler = folder / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def test_a_second_gateway_on_one_folder_serves_grpc_until_the_first_is_gone(tmp_path):
    first, second = Gateway(tmp_path / "state"), Gateway(tmp_path / "state")
    with second_after(first, second):
        second.comes_back()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_lock_file_that_is_removed_lets_no_second_gateway_in(tmp_path, is_replaced):
    first, second = Gateway(tmp_path / "state"), Gateway(tmp_path / "state")
    with first.running():
        first.comes_back()
        (tmp_path / "state" / ".lock").unlink()
        if is_replaced:
            (tmp_path / "state" / ".lock").write_text("process 1 on another")
        with second.running():
            assert "state is used by another gateway" in second.refusal()
            assert first.open_session().status_code == 200


FILES = (".lock", ".seeds.secret.new", "seeds.secret", "downloads.secret", "clock.json", "tinker.sqlite",
         "tinker.sqlite-wal", "online.sqlite", "metaclaw.sqlite")  # fmt: skip
ODD = {
    "a pipe": lambda path, _: os.mkfifo(path),
    "a folder": lambda path, _: path.mkdir(),
    "a link": lambda path, elsewhere: path.symlink_to(elsewhere),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_named_one_after_the_other_and_grpc_is_served(tmp_path, kind):
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    state.mkdir()
    odd = {state / name for name in FILES if kind == "a folder" or not name.endswith(".new")}
    for path in odd:
        ODD[kind](path, elsewhere)
    with Gateway(state).running() as gateway:
        while odd:
            refusal = gateway.refusal()
            (found,) = (path for path in odd if f"{path} is {kind}, and the gateway needs a regular file" in refusal)
            assert "move it away" in refusal
            found.rename(tmp_path / found.name)
            odd.remove(found)
            if odd:
                until(lambda path=found: str(path) + " is" not in gateway.open_session().json()["detail"])
        gateway.comes_back()
        assert not elsewhere.exists()


def test_a_state_that_is_no_folder_is_named(tmp_path):
    state = tmp_path / "state"
    state.write_text("")
    with Gateway(state).running() as gateway:
        assert f"{state} is no folder, or is below a file; move that away" in gateway.refusal()
        state.unlink()
        gateway.comes_back()


@contextmanager
def second_after(first: Gateway, second: Gateway):
    """Run two gateways on one folder, and end the first."""
    started = first.running()
    started.__enter__()
    is_running = True
    try:
        first.comes_back()
        with second.running():
            refusal = second.refusal()
            assert "state is used by another gateway (process " in refusal
            assert first.grpc in refusal
            assert first.open_session().status_code == 200
            started.__exit__(None, None, None)
            is_running = False
            yield
    finally:
        if is_running:
            started.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["tinker.sqlite", "online.sqlite"])
def test_only_damage_is_to_be_set_aside(tmp_path, name):
    damaged = tmp_path / name
    damaged.write_bytes(b"no database" * 1000)
    with Gateway(tmp_path).running() as gateway:
        refusal = gateway.refusal()
        assert f"{damaged} is damaged" in refusal
        assert "set it aside" in refusal
        assert damaged.read_bytes() == b"no database" * 1000
        damaged.rename(tmp_path / "aside")
        gateway.comes_back()


def test_a_disk_that_is_full_at_the_start_or_later_has_to_get_space(tmp_path):
    with disk(tmp_path / "disk", "size=2m") as folder:
        filler = fill(folder)
        with Gateway(folder / "http").running() as gateway:
            refusal = gateway.refusal()
            assert "its disk is full; free space there" in refusal
            assert "aside" not in refusal
            filler.unlink()
            gateway.comes_back()
            filler = fill(folder)
            until(lambda: gateway.open_session().status_code == 503)
            refusal = gateway.open_session().json()["detail"]
            assert "its disk is full; free space there" in refusal
            assert "aside" not in refusal
            assert gateway.is_out()
            filler.unlink()
            gateway.comes_back()


def test_a_disk_that_is_read_only_has_to_become_writable(tmp_path):
    with disk(tmp_path / "disk", "size=8m,ro") as folder, Gateway(folder / "http").running() as gateway:
        refusal = gateway.refusal()
        assert "read-only" in refusal
        assert "aside" not in refusal
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        gateway.comes_back()


def test_the_http_port_is_bound_once_it_is_free(tmp_path):
    gateway = Gateway(tmp_path)
    host, port = gateway.http.split(":")
    with socket.create_server((host, int(port))) as taken, gateway.running():
        assert gateway.is_out()
        taken.close()
        until(lambda: not gateway.is_out())
        gateway.comes_back()

"""The supervisor of `paceline up` watches processes, restarts them, gives up, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.ports import free_port
from support.stacks.cluster import wait_for

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 120
"""A timeout far longer than anything here takes."""


class Running:
    """A supervisor of toy services, as a process."""

    def __init__(
        self,
        folder: Path,
        services: dict[str, str],
        stderr: int | None = None,
        stdin: int = subprocess.PIPE,
        **options: object,
    ) -> None:
        self.folder = folder
        environments = {
            name: {"TOY_DOES": does, "TOY_HEALTH": f"127.0.0.1:{free_port()}", "TOY_PIDS": str(folder / name)}
            for name, does in services.items()
        }
        given = {"services": environments, "logs": str(folder / "logs"), "until_eof": False, "stop_seconds": 30.0}
        given["after"] = {}
        (folder / "plans.json").write_text(json.dumps(given | options))
        with (folder / "said").open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.stacks.toy_up", str(folder / "plans.json")],
                env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
                stdin=stdin,
                stderr=said if stderr is None else stderr,
            )

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def wait_said(self, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.said(), re.DOTALL), SECONDS, self.said)

    def services(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "support.stacks.toy_service" in child.cmdline()]

    def left(self, name: str) -> list[int]:
        return [int(line) for line in (self.folder / name).read_text().split()]

    def wait(self) -> int:
        return self.process.wait(SECONDS)


@contextmanager
def supervising(folder: Path, services: dict[str, str], **options: object):
    running = Running(folder, services, **options)
    try:
        yield running
    finally:
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        running.wait()
        if running.process.stdin is not None:
            running.process.stdin.close()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_killed_service_is_started_again_and_what_it_left_is_ended(tmp_path):
    with supervising(tmp_path, {"sampler": "leaves,serves"}) as running:
        running.wait_said("up")
        (service,), (orphan,) = running.services(), running.left("sampler")
        service.kill()
        running.wait_said("ended and is restarted: SIGKILL.*ready")
        assert not is_alive(orphan)
        assert [pid for pid in running.left("sampler") if is_alive(pid)] == running.left("sampler")[1:]
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0
        assert not any(map(is_alive, running.left("sampler")))


@contextmanager
def hangups(action: signal.Handlers):
    """Have processes that are started in the block inherit what a hangup does to them."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_services_outlive_their_terminal_under_nohup(tmp_path):
    with hangups(signal.SIG_IGN), supervising(tmp_path, {"sampler": "serves"}) as running:
        running.wait_said("up")
        running.process.send_signal(signal.SIGHUP)
        running.services()[0].kill()
        running.wait_said("ended and is restarted: SIGKILL.*ready")
        assert "stopping" not in running.said()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_services_end_although_nobody_reads_that_they_stop(tmp_path, number):
    """As after Ctrl-C in `make up | tee log`, which ends tee too, or when the terminal is closed."""
    with hangups(signal.SIG_DFL), supervising(tmp_path, {"sampler": "serves"}, stderr=subprocess.PIPE) as running:
        assert any(line == b"up\n" for line in running.process.stderr)
        running.process.stderr.close()
        (service,) = running.services()
        running.process.send_signal(number)
        assert running.wait() == 0
        assert not is_alive(service.pid)


def test_a_service_that_dies_three_times_in_a_row_is_given_up_with_its_reason_in_one_line(tmp_path):
    with supervising(tmp_path, {"trainer": "breaks", "sampler": "leaves,serves"}) as running:
        assert running.wait() == 1
        *before, last = running.said().splitlines()
        log = tmp_path / "logs" / "trainer.log"
        reason = "ImportError: libcudnn.so.9: cannot open shared object file"
        assert last == f"the trainer ended 3 times in a row: {reason} (log: {log})"
        assert sum("is restarted" in line for line in before) == 2
        assert log.read_text().count("a first line") == 3
        assert not any(map(is_alive, running.left("sampler")))


def test_a_program_that_waits_is_told_of_the_first_death_at_the_start(tmp_path):
    with supervising(tmp_path, {"trainer": "breaks", "sampler": "serves"}, until_eof=True) as running:
        assert running.wait() == 1
        reason = "ImportError: libcudnn.so.9: cannot open shared object file"
        last = f"the trainer could not be started: {reason} (log: {tmp_path / 'logs' / 'trainer.log'})"
        assert running.said().splitlines()[-1] == last
        assert (tmp_path / "logs" / "trainer.log").read_text().count("a first line") == 1


def test_a_service_starts_when_the_one_before_it_is_ready(tmp_path):
    after = {"trainer": "sampler"}
    with supervising(tmp_path, {"trainer": "serves", "sampler": "serves"}, after=after) as running:
        running.wait_said("sampler is ready.*trainer is ready.*up")
        first, second = sorted(running.services(), key=psutil.Process.create_time)
        assert first.environ()["TOY_PIDS"].endswith("sampler")
        assert second.create_time() > first.create_time()


def test_a_service_whose_predecessor_is_given_up_is_never_started(tmp_path):
    after = {"trainer": "sampler"}
    with supervising(tmp_path, {"trainer": "serves", "sampler": "breaks"}, after=after) as running:
        assert running.wait() == 1
        assert "the sampler ended 3 times in a row" in running.said()
        assert not (tmp_path / "logs" / "trainer.log").exists()


def test_a_service_that_does_not_stop_is_killed(tmp_path):
    with supervising(tmp_path, {"sampler": "stubborn,leaves,serves"}, stop_seconds=0.1) as running:
        running.wait_said("up")
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0
        assert not any(map(is_alive, running.left("sampler")))


def test_a_second_signal_does_not_wait(tmp_path):
    with supervising(tmp_path, {"sampler": "stubborn,serves"}, stop_seconds=1e6) as running:
        running.wait_said("up")
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0


def test_services_end_with_standard_input_where_that_is_asked_for(tmp_path):
    with supervising(tmp_path, {"sampler": "serves"}, until_eof=True) as running:
        running.wait_said("up")
        running.process.stdin.close()
        assert running.wait() == 0


def test_standard_input_that_is_at_its_end_starts_no_service(tmp_path):
    how = {"stdin": subprocess.DEVNULL, "until_eof": True}
    with supervising(tmp_path, {"sampler": "serves"}, **how) as running:
        assert running.wait() == 0
        assert [line.rpartition(" ")[2] for line in running.said().splitlines()] == ["stopping", "stopped"]
        assert not (tmp_path / "sampler").exists()


@pytest.mark.parametrize("again", [False, True])
def test_logs_are_files_of_their_own_and_the_ones_before_are_kept(tmp_path, again):
    logs = tmp_path / "logs"
    if again:
        logs.mkdir()
        (logs / "sampler.log").write_text("an earlier one")
    with supervising(tmp_path, {"sampler": "serves"}) as running:
        running.wait_said("up")
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0
    assert "a first line" in (logs / "sampler.log").read_text()
    assert stat.S_IMODE((logs / "sampler.log").stat().st_mode) == 0o600
    assert [path.read_text() for path in logs.glob("*.previous.log")] == ["an earlier one"] * again

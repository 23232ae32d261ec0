"""What tests of every folder start from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from support.stacks.warm_processes import VARIABLE, OwnWarmProcesses

from paceline.machine import count_gpus


def pytest_configure(config: pytest.Config) -> None:
    """Have the processes that services are forked from ready, once for all of xdist's workers; time no examples."""
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if hasattr(config, "workerinput") or count_gpus():  # no GPU's driver survives a fork
        return
    directory = TemporaryDirectory()
    warm = OwnWarmProcesses(Path(directory.name))
    os.environ[VARIABLE] = directory.name

    def close() -> None:
        del os.environ[VARIABLE]
        warm.close()
        directory.cleanup()

    config.add_cleanup(close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file on one worker, and all of tests/contract, whose engines each worker has once."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = "tests/contract/"
            return folder if nodeid.startswith(folder) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def vllm_here() -> Iterator[None]:
    """vLLM starts in this process: in a second or two, by a fork, and with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what vLLM's engines are forked from, where a test needs one, before tests start threads."""
    if any("vllm_here" in getattr(item, "fixturenames", ()) for item in session.items):
        from sampler_service.engine.vllm.forks import start_fork_server

        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # which takes what engines write, too
        start_fork_server()
        capture.suspend_global_capture()

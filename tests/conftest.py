"""Hooks and fixtures for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import structlog
from hypothesis import settings
from support.stacks.warm_processes import VARIABLE, OwnWarmProcesses

from paceline.machine import count_gpus

_UNIT, _CONTRACT = Path(__file__).parent / "unit", Path(__file__).parent / "contract"


def pytest_configure(config: pytest.Config) -> None:
    """Start the processes that services and xdist workers are forked from, once; disable hypothesis deadlines."""
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    # By default, structlog renders the source of each frame of an exception in colour, which takes half a second.
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])
    gc.disable()  # collection imports half a million objects that stay; searching them for garbage takes a fifth of it
    if hasattr(config, "workerinput") or config.option.collectonly or count_gpus():  # GPU drivers do not survive a fork
        return
    directory = TemporaryDirectory()
    warm = OwnWarmProcesses(Path(directory.name), collected=config.args)
    os.environ[VARIABLE] = directory.name
    if workers := getattr(config.option, "tx", None):
        config.option.tx = [f"{spec}//python={warm.python}" for spec in workers]

    def close() -> None:
        del os.environ[VARIABLE]
        warm.close()
        directory.cleanup()

    config.add_cleanup(close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep each file on one worker, and all of tests/contract on one, because every worker starts its own engines."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = "tests/contract/"
            return folder if nodeid.startswith(folder) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of tests/unit, which compute, among the others, which mostly wait for services.

    The others come a little earlier, because the longest are among them. The files of tests/contract share engines, so
    their tests stay together.
    """
    folders = [_CONTRACT if _CONTRACT in item.path.parents else item.path for item in items]
    files = list(dict.fromkeys(folders))
    computing = [path for path in files if _UNIT in path.parents]
    waiting = [path for path in files if _UNIT not in path.parents]
    place = {path: (number + 1) / len(computing) for number, path in enumerate(computing)}
    place |= {path: 0.9 * number / len(waiting) for number, path in enumerate(waiting)}
    places = {item: place[path] for item, path in zip(items, folders, strict=True)}
    items.sort(key=places.__getitem__)


@pytest.fixture(scope="session")
def vllm_here() -> Iterator[None]:
    """Let vLLM start from this process: by a fork, in a second or two, with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """End the pause of garbage collection; if a test needs it, start the server that vLLM's engines are forked from.

    It is started before tests start threads.
    """
    gc.freeze()
    gc.enable()
    needs_vllm = any("vllm_here" in getattr(item, "fixturenames", ()) for item in session.items)
    if needs_vllm and not session.config.option.collectonly:
        from sampler_service.engine.vllm.forks import start_fork_server

        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # it also captures what engines write
        start_fork_server()
        capture.suspend_global_capture()

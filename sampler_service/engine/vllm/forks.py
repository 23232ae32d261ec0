"""Starts vLLM's engine process as a fork, so that it starts with everything imported.

vLLM starts its engine as a new interpreter, which imports torch, transformers and vLLM a second time. That is most of
the time that a small model, or a restarted engine, takes to start. On a CPU only threads prevent a fork. So this
process is forked while it has a single thread, and Python's own fork server, running in that copy, forks the engine
processes. On GPUs, whose drivers do not survive a fork, vLLM starts its processes in its usual way.

For the same reason vLLM looks at the class of a model that it has not seen on this machine in a new interpreter. On a
CPU this process does it itself.
"""

# ruff: noqa: SLF001 - Python starts its fork server only as a new interpreter; here a copy of this process becomes one

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, TypeVar

from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils.system_utils import set_process_title
from vllm.v1.engine import utils

from paceline.child import end_with_parent, fork

_T = TypeVar("_T")

_NEEDED = [
    __name__,
    "vllm.v1.engine.core",
    "sampler_service.engine.vllm.cpu.lora",
    "sampler_service.engine.vllm.worker.extension",
    "sampler_service.engine.vllm.grammar_process",
]
"""Modules that an engine process, or the process for grammars, imports."""


class _ForkedProcess(ForkServerProcess):
    """A fork that ends with its parent process, and has the environment of the process that requested it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        end_with_parent()
        # Garbage collection would look through what was imported, almost a million objects, and copy the pages that
        # the fork shares. vLLM gives the objects back to it when the engine ends, which only helps a process that lives
        # on.
        gc.freeze()
        gc.unfreeze = _do_nothing
        # Setting the title overwrites the process's arguments and environment in memory, and can find them only while
        # they are unchanged. So it is done first.
        set_process_title("Engine")
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(self._environment)
        # torch read this variable when it was imported, possibly before it was set.
        import torch._dynamo.config as dynamo  # noqa: PLC0415

        dynamo.disable = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"
        super().run()


class _Context(ForkServerContext):
    Process = _ForkedProcess


def start_fork_server() -> None:
    """Make vLLM fork its engine processes from a copy of the current process; only on CPUs under Linux.

    Call it once, before this process has threads. The copy ends with this process, and its forks end with the copy.
    """
    if sys.platform != "linux" or not current_platform.is_cpu():
        return
    for module in _NEEDED:
        import_module(module)
    registry._run_in_subprocess = _run_here  # before the fork, so that the copies do the same
    alive_read, alive_write = os.pipe()
    address = arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = fork(partial(_serve, listener.fileno(), alive_read, alive_write))
    os.close(alive_read)
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_write
    server._forkserver_pid = pid
    # If the fork server dies, Python replaces it with a new interpreter, which imports these.
    server.set_forkserver_preload(_NEEDED)
    utils.get_mp_context = _Context  # type: ignore[attr-defined]


def _serve(listener: int, alive: int, others_alive: int) -> None:
    os.close(others_alive)
    end_with_parent()
    set_process_title("ForkServer")
    with suppress(SystemExit):  # when no process is left that may ask for a fork
        forkserver.main(listener, alive, [])


def _run_here(fn: Callable[[], _T]) -> _T:
    return fn()


def _do_nothing() -> None:
    """Leave what is frozen as it is."""

"""vLLM's engine process as a fork of this one, so that it starts with everything imported.

vLLM starts its engine as a new interpreter, which imports torch, transformers and vLLM a second time: most of what the
start of a small model takes, and of what building an engine again takes. On a CPU nothing but threads stands in the way
of a fork. So a copy of this process is made while it has one thread, and Python's own fork server, run in that copy,
makes the engine processes. On GPUs, whose drivers no fork survives, vLLM starts its processes as ever.
"""

# ruff: noqa: SLF001 - Python starts its fork server as a new interpreter only; here a copy of this process is one

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.system_utils import set_process_title
from vllm.v1.engine import utils

_NEEDED = [
    __name__,
    "vllm.v1.engine.core",
    "sampler_service.engine.vllm.cpu.lora",
    "sampler_service.engine.vllm.worker.extension",
]
"""What an engine process imports."""
_PR_SET_PDEATHSIG = 1


class _EngineProcess(ForkServerProcess):
    """A fork that ends with the process it was forked from, in the environment of the process that asked for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        _end_with_parent()
        # Titles are written over a process's arguments and environment, which are found while these are as they were.
        set_process_title("Engine")
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(self._environment)
        # torch read this variable when it was imported, which may have been before it was set.
        import torch._dynamo.config as dynamo  # noqa: PLC0415

        dynamo.disable = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"
        super().run()


class _Context(ForkServerContext):
    Process = _EngineProcess


def start_fork_server() -> None:
    """Have vLLM fork its engine processes from a copy of this process as it is now; on a CPU under Linux.

    Call it once, before this process has threads. The copy ends with this process, and its forks with the copy.
    """
    if sys.platform != "linux" or not current_platform.is_cpu():
        return
    for module in _NEEDED:
        import_module(module)
    alive_read, alive_write = os.pipe()
    address = arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(alive_write)
            _serve(listener.fileno(), alive_read)
    os.close(alive_read)
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_write
    server._forkserver_pid = pid
    # One that dies is replaced by Python with a new interpreter, which imports these.
    server.set_forkserver_preload(_NEEDED)
    utils.get_mp_context = _Context  # type: ignore[attr-defined]


def _serve(listener: int, alive: int) -> None:
    try:
        _end_with_parent()
        gc.freeze()  # what forks share stays shared when one looks for garbage
        set_process_title("ForkServer")
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

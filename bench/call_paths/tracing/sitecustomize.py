"""Record which function calls which. Loaded by every Python process that has this directory on PYTHONPATH.

`python -m bench.call_paths` writes the name of a window into $CALL_TRACE/window. While a window is open, each process
collects the calls between functions of the product, and writes them to $CALL_TRACE when the window changes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from time import sleep
from types import CodeType, FrameType
from typing import Any

_PACKAGES = ("paceline", "trainer_service", "sampler_service", "gateway")
_POLL_SECONDS = 0.02
_EVENT_LOOPS = ("/asyncio/base_events.py", "/asyncio/runners.py", "/uvloop/__init__.py")
"""Files of event loops: what they call has no caller."""


class CallTracer:
    """Collects the calls of this process, in all of its threads."""

    def __init__(self, directory: Path, root: str) -> None:
        self._directory = directory
        self._root = root
        self._names: dict[CodeType, str | None] = {}
        self._calls: set[tuple[str, str]] = set()
        self._window = ""

    def start(self) -> None:
        """Trace this thread and those started later."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        self._follow()
        os.register_at_fork(after_in_child=self._follow)

    def _follow(self) -> None:
        threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)
        file = self._directory / "window"
        threading.setprofile(self._event)
        while True:
            window = file.read_text() if file.exists() else ""
            if window != self._window:
                calls, self._calls = self._calls, set()
                if self._window:
                    path = self._directory / f"{self._window}-{os.getpid()}.json"
                    path.write_text(json.dumps(sorted(calls)))
                self._window = window
            sleep(_POLL_SECONDS)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._window:
            return
        callee = self._name(frame.f_code)
        if callee is None:
            return
        caller = frame.f_back
        while caller is not None and self._name(caller.f_code) is None:
            caller = None if caller.f_code.co_filename.endswith(_EVENT_LOOPS) else caller.f_back
        self._calls.add(((self._name(caller.f_code) or "") if caller else "", callee))

    def _name(self, code: CodeType) -> str | None:
        """Return file:function for a function of the product; None for other functions and generated code."""
        try:
            return self._names[code]
        except KeyError:
            name = None
            if code.co_filename.startswith(self._root):
                file = code.co_filename[len(self._root) :]
                if file.split("/")[0] in _PACKAGES and "_pb2" not in file and not code.co_name.startswith("<"):
                    name = f"{file}:{code.co_qualname}"
            self._names[code] = name
            return name


if "CALL_TRACE" in os.environ:
    CallTracer(Path(os.environ["CALL_TRACE"]), os.environ["CALL_TRACE_ROOT"]).start()

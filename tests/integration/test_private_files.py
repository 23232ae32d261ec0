"""Only its user can access what a service writes, whatever the shell's umask was."""

from __future__ import annotations

import os

import pytest
from prometheus_client import CollectorRegistry

from paceline.rpc.server import Readiness, serve
from paceline.settings import ServiceSettings


class Writer:
    """A service that writes a file and a directory while it starts, then fails."""

    name = "writer"
    service_names = ("paceline.gateway.v1.GatewayService",)

    def __init__(self, folder) -> None:
        self._folder = folder

    def interceptors(self):
        return ()

    async def start(self, readiness: Readiness) -> None:
        (self._folder / "run").mkdir()
        (self._folder / "run" / "journal").write_bytes(b"data")
        readiness.fail("it has written")

    def register(self, server) -> None:
        """Register no servicer."""

    def drain(self) -> None:
        """Do nothing: no request is in flight."""

    async def stop(self) -> None:
        """Do nothing: nothing was started."""


async def test_files_and_directories_are_private(tmp_path):
    before = os.umask(0o022)
    try:
        with pytest.raises(SystemExit):
            await serve(Writer(tmp_path), ServiceSettings(), CollectorRegistry())
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run" / "journal").stat().st_mode & 0o777 == 0o600

"""What a service writes is its user's alone, whatever the shell's umask was."""

from __future__ import annotations

import os

import pytest
from prometheus_client import CollectorRegistry

from paceline.rpc.server import Readiness, serve
from paceline.settings import ServiceSettings


class Writer:
    """Writes a file and a directory while it starts, and fails then."""

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
        """Serve nothing."""

    def drain(self) -> None:
        """Nothing waits."""

    async def stop(self) -> None:
        """Nothing was begun."""


async def test_files_and_directories_are_private(tmp_path):
    before = os.umask(0o022)
    try:
        with pytest.raises(SystemExit):
            await serve(Writer(tmp_path), ServiceSettings(), CollectorRegistry())
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run" / "journal").stat().st_mode & 0o777 == 0o600

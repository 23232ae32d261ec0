"""The message of a service that cannot start."""

from __future__ import annotations

import errno
import os
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry

from paceline.errors import Unsupported
from paceline.files.folder_lock import FolderLock
from paceline.rpc.server import serve
from paceline.settings import ServiceSettings
from trainer_service.service import TrainerService
from trainer_service.settings import TrainerSettings

SENTENCE = "tiny cannot be served: model.layers.0.mixer (Mixer) gives different results."


class Refusing:
    """A service that cannot start."""

    name = "refusing"
    service_names = ("paceline.gateway.v1.GatewayService",)
    stopped = False

    def interceptors(self):
        return ()

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def start(self, _readiness) -> None:
        raise self._error

    def register(self, server) -> None:
        """Register no servicer."""

    def drain(self) -> None:
        """Do nothing: no request is in flight."""

    async def stop(self) -> None:
        self.stopped = True


async def ended(service, settings) -> object:
    """Start a service that cannot start, and return what its process prints last."""
    before = os.umask(0o077)
    try:
        with pytest.raises(SystemExit) as end:
            await serve(service, settings, CollectorRegistry())
    finally:
        os.umask(before)
    return end.value.code


async def test_a_service_that_cannot_start_ends_with_the_sentence_of_its_error():
    service = Refusing(Unsupported(SENTENCE))
    assert await ended(service, ServiceSettings()) == SENTENCE
    assert service.stopped


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "Read-only file system; mount it so that it can be written to"),
        (errno.ENOSPC, "No space left on device; free space on the disk"),
        (errno.EACCES, "Permission denied; let the service's user read and write it"),
        (errno.ENOENT, "No such file or directory; choose another path, or mend it"),
    ],
)
async def test_a_disk_that_a_service_cannot_use_is_named_with_what_to_do(number, remedy):
    service = Refusing(OSError(number, os.strerror(number), "/volume/.lock"))
    assert await ended(service, ServiceSettings()) == f"/volume/.lock: {remedy}"
    assert service.stopped


async def test_a_volume_that_is_a_file_ends_the_trainer_with_a_sentence(tmp_path):
    (tmp_path / "volume").touch()
    settings = TrainerSettings(
        model="none", insecure=True, checkpoint_dir=tmp_path / "volume", staging_dir=tmp_path / "staging"
    )
    service = TrainerService(settings, CollectorRegistry())
    sentence = f"{tmp_path}/volume: File exists; a folder is needed: choose another path"
    assert await ended(service, settings) == sentence


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_second_trainer_on_a_volume_is_refused_whatever_becomes_of_the_lock_file(tmp_path, is_removed):
    volume = tmp_path / "volume"
    volume.mkdir()
    settings = TrainerSettings(model="none", insecure=True, checkpoint_dir=volume, staging_dir=tmp_path / "staging")
    with closing(FolderLock(volume)):
        if is_removed:
            (volume / ".lock").unlink()
        sentence = await ended(TrainerService(settings, CollectorRegistry()), settings)
    assert f"checkpoint_dir: {volume} is used by another trainer (" in sentence
    assert "give this one its own" in sentence

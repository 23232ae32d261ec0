"""Crash-safe deletion of a run's files: a crash at any point leaves the run whole or deleted, even on a full disk.

A single rename decides. If the checkpoints are deleted too, the run's folder is renamed to `.deleted-<run_id>`; if they
are kept, run.json is renamed to deleted.json. Neither needs disk space. The remaining steps free space, and after a
crash the next startup repeats all of them: remove the files, store the request, remove the last trace.

The request is the CreateRun that created the run: repeating it must not create another run. Its run's id tells samplers
that were away which of their versions to drop.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from paceline import errors, layout
from paceline.layout import DELETED_FILE, RUN_FILE
from paceline.log import get_logger
from trainer_service.volume_files import (
    COPY_FILE,
    DamagedFileError,
    decode_checked,
    read_own,
    read_run_file,
    write_checked,
)

_REQUESTS_FILE = "deleted-runs.json"
KEPT_REQUESTS = 1_000
"""Newest requests kept per tenant."""
_PREFIX = ".deleted-"
_KEPT_FILES = frozenset({"state", "sampler", DELETED_FILE, COPY_FILE})
"""Names that remain of a run whose checkpoints are kept; the copy of its file only until all else is done."""

_log = get_logger(__name__)


class _Request(msgspec.Struct, frozen=True):
    tenant: str
    request_id: str
    digest: str
    run_id: str
    """Run that the request created."""


class DeletedRuns:
    """Deletes runs; keeps the CreateRun requests of deleted ones, stored on the volume."""

    def __init__(self, root: Path) -> None:
        self._path = root / _REQUESTS_FILE
        self._requests: OrderedDict[tuple[str, str], _Request] = OrderedDict()
        self._lock = Lock()
        """Held while the requests change or are written, because runs are deleted in several threads."""

    def read(self) -> None:
        """Read the requests from the volume. Raises UnknownFormatError."""
        if not self._path.exists():
            return
        try:
            known = decode_checked(read_own(self._path), list[_Request], _REQUESTS_FILE)
        except DamagedFileError as error:
            aside = layout.quarantine(self._path)
            _log.error("requests of deleted runs damaged and set aside", aside=aside.name, error=str(error))
            return
        self._requests.update({(request.tenant, request.request_id): request for request in known})

    def add(self, tenant: str, request_id: str, digest: str, run_id: str) -> None:
        """Store a request durably. Raises DiskFull."""
        with self._lock:
            self._requests[tenant, request_id] = _Request(tenant, request_id, digest, run_id)
            of_tenant = [key for key in self._requests if key[0] == tenant]
            for oldest in of_tenant[:-KEPT_REQUESTS]:
                del self._requests[oldest]
            write_checked(self._path, list(self._requests.values()))

    def find(self, tenant: str, request_id: str) -> str:
        """Return the digest of a tenant's request; empty if the request is not known."""
        request = self._requests.get((tenant, request_id))
        return request.digest if request is not None else ""

    def run_ids(self) -> set[str]:
        """Return the deleted runs whose requests are kept."""
        with self._lock:
            return {request.run_id for request in self._requests.values()}

    def delete_files(self, folder: Path, *, keep_checkpoints: bool) -> None:
        """Delete a run's files. If this raises, the run is deleted all the same, unless the first rename failed."""
        if keep_checkpoints:
            (folder / RUN_FILE).rename(folder / DELETED_FILE)
            layout.sync_directory(folder)
        else:
            gone = folder.with_name(_PREFIX + folder.name)
            folder.rename(gone)
            layout.sync_directory(folder.parent)
            folder = gone
        self._finish(folder)

    def finish_all(self, runs: Path) -> None:
        """Finish the deletions that a crash interrupted."""
        for folder in sorted(runs.iterdir()):
            with suppress(OSError):  # of a run that cannot be read, which the registry reports
                is_unfinished = (folder / DELETED_FILE).exists() and (folder / COPY_FILE).exists()
                if folder.name.startswith(_PREFIX) or is_unfinished:
                    self._finish(folder)

    def _finish(self, folder: Path) -> None:
        """Remove what remains of a deleted run. What fails is retried at the next startup."""
        is_whole = folder.name.startswith(_PREFIX)
        kept = {RUN_FILE, COPY_FILE} if is_whole else _KEPT_FILES
        try:
            for path in folder.iterdir():
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self._add_request(folder)
            if is_whole:
                shutil.rmtree(folder)
            else:
                (folder / COPY_FILE).unlink(missing_ok=True)
        except (OSError, errors.DiskFull) as error:
            message = "a deleted run's files are not all removed; the next startup removes them"
            _log.warning(message, folder=str(folder), error=str(error))

    def _add_request(self, folder: Path) -> None:
        """Store the request that created a run. Raises DiskFull, OSError."""
        deleted = folder / DELETED_FILE
        try:
            if deleted.exists():
                content = decode_checked(read_own(deleted), dict[str, Any], DELETED_FILE)
            else:
                content = read_run_file(folder)
            self.add(content["tenant"], content["request_id"], content["request_digest"], content["run_id"])
        except (DamagedFileError, FileNotFoundError, KeyError) as error:
            message = "a deleted run's CreateRun request is not known; repeating it would create another run"
            _log.error(message, folder=folder.name, error=str(error))

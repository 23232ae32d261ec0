"""Crash-safe deletion of a run's files: a crash at any point leaves the run whole or deleted, even on a full disk.

A single rename decides. If the checkpoints are deleted too, the run's folder is renamed to `.deleted-<run_id>`; if they
are kept, run.json is renamed to deleted.json. Neither needs disk space. The remaining steps free space, and after a
crash the next startup repeats all of them: remove the files, store the request, remove the last trace.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import errors, layout
from paceline.layout import DELETED_FILE, RUN_FILE
from paceline.log import get_logger
from trainer_service.volume.checked_file import DamagedFileError
from trainer_service.volume.run_file import COPY_FILE, decode_run_file, read_run_file

_PREFIX = ".deleted-"
_KEPT = frozenset({"state", "sampler", DELETED_FILE, COPY_FILE})
"""Names that remain of a run whose checkpoints are kept; the copy of its file only until all else is done."""

Remember = Callable[[str, str, str], None]
"""Stores a tenant, its request_id and the request's digest durably."""

_log = get_logger(__name__)


def delete_files(folder: Path, remember: Remember, *, keep_checkpoints: bool) -> None:
    """Delete a run's files. If this raises, the run is deleted all the same, unless the first rename raised OSError."""
    if keep_checkpoints:
        (folder / RUN_FILE).rename(folder / DELETED_FILE)
        layout.sync_directory(folder)
    else:
        gone = folder.with_name(_PREFIX + folder.name)
        folder.rename(gone)
        layout.sync_directory(folder.parent)
        folder = gone
    finish(folder, remember)


def finish_all(runs: Path, remember: Remember) -> None:
    """Finish the deletions that a crash interrupted."""
    for folder in sorted(runs.iterdir()):
        interrupted = folder.name.startswith(_PREFIX) or (
            (folder / DELETED_FILE).exists() and (folder / COPY_FILE).exists()
        )
        if interrupted:
            finish(folder, remember)


def finish(folder: Path, remember: Remember) -> None:
    """Remove what remains of a deleted run. What fails is retried at the next startup."""
    try:
        _finish(folder, remember)
    except (OSError, errors.DiskFull) as error:
        _log.warning(
            "a deleted run's files are not all removed; the next start does", folder=str(folder), error=str(error)
        )


def _finish(folder: Path, remember: Remember) -> None:
    all_goes = folder.name.startswith(_PREFIX)
    kept = {RUN_FILE, COPY_FILE} if all_goes else _KEPT
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    try:
        facts = _facts(folder)
        remember(facts["tenant"], facts["request_id"], facts["request_digest"])
    except (DamagedFileError, FileNotFoundError, KeyError) as error:
        _log.error("a deleted run's request is not known and may make another", folder=folder.name, error=str(error))
    if all_goes:
        shutil.rmtree(folder)
    else:
        (folder / COPY_FILE).unlink(missing_ok=True)


def _facts(folder: Path) -> dict[str, Any]:
    if (folder / DELETED_FILE).exists():
        return decode_run_file((folder / DELETED_FILE).read_bytes(), DELETED_FILE)
    return read_run_file(folder)

"""Deleting a run's files, so that a crash at any point leaves it whole or deleted, also where the disk is full.

One rename decides. A run that goes with its checkpoints is renamed to `.deleted-<run_id>`, one whose checkpoints stay
gets its run.json renamed to deleted.json. Neither takes room. What is left to do, which makes room, is done again from
the start at the next start: remove the files, remember the request, remove the last trace.
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
"""What stays of a run whose checkpoints stay; the copy of its file, until all else is done."""

Remember = Callable[[str, str, str], None]
"""Keeps a tenant's request and its digest, durably."""

_log = get_logger(__name__)


def delete_files(folder: Path, remember: Remember, *, keep_checkpoints: bool) -> None:
    """Delete a run's files. The run is gone when this raises, too, but for an OSError of the first rename."""
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
    """Remove what a deleted run leaves. What cannot be done now is done at the next start."""
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

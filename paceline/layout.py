"""Layout of the checkpoint volume, and atomic writes to it.

    <root>/runs/<run_id>/run.json
    <root>/runs/<run_id>/metrics.jsonl, rollouts.jsonl
    <root>/runs/<run_id>/state/<name>/      a state checkpoint
    <root>/runs/<run_id>/sampler/<name>/    a sampler checkpoint
    <root>/runs/<run_id>/versions/<n>/      a published version

Each of the last three is a PEFT directory with a manifest.json. A directory is written under a temporary name, synced,
and renamed, so a directory with its final name is complete. A directory that replaces another is exchanged with it
atomically. File systems that cannot do that get two renames, and `sweep` and `opened` handle the state between them.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from paceline import errors
from paceline.files.regular_files import copy_file, link_file, open_folder
from paceline.types import CheckpointKind

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
MANIFEST_FILE = "manifest.json"
STAGED = ".new-"
"""Prefix of the names of files and directories that are being written."""
RUN_FILE, DELETED_FILE = "run.json", "deleted.json"
"""The record of a run, and the record of a deleted run whose checkpoints remain."""
METRICS_FILE, ROLLOUTS_FILE = "metrics.jsonl", "rollouts.jsonl"
"""What was measured of a run, and the rollouts that its clients logged."""
MODEL_FILE = "model.safetensors"
"""Weights of a full-parameter run."""
ADAPTER_FILES = frozenset({WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE})
"""The only files allowed in an adapter's directory: other loaders would also read pickled files found there."""

SCHEME = "paceline://"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RUN_ID = re.compile(r"run-[0-9a-f]{32}")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The parts of paceline://<run_id>/<kind>/<name>."""

    run_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, path: str, field: str = "path") -> CheckpointPath:
        """Parse a path. Raises InvalidPath unless it has exactly this form."""
        if not isinstance(path, str):
            raise errors.InvalidPath.of_type(path, "the path of a checkpoint, paceline://...", field)
        run_id, _, rest = path.removeprefix(SCHEME).partition("/")
        folder, _, name = rest.partition("/")
        kinds = {kind.folder: kind for kind in CheckpointKind}
        if (
            not path.startswith(SCHEME)
            or not _RUN_ID.fullmatch(run_id)
            or folder not in kinds
            or not _NAME.fullmatch(name)
        ):
            message = "is not of the form paceline://<run_id>/state|sampler/<name>; list_checkpoints returns such paths"
            raise errors.InvalidPath(message, field=field)
        return cls(run_id, kinds[folder], name)

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind.folder}/{self.name}"


def check_name(name: str, field: str = "name") -> str:
    """Return `name` if it is a valid checkpoint name. Raises InvalidName otherwise."""
    if not _NAME.fullmatch(name):
        raise errors.InvalidName("must be 1 to 128 characters of [A-Za-z0-9._-], not starting with a dot", field=field)
    return name


def check_run_id(run_id: str, field: str = "run_id") -> str:
    """Return `run_id` if it is well-formed, so that nothing else gets into a path. Raises MissingField, RunNotFound."""
    if not run_id:
        raise errors.MissingField("is not set; name the run", field=field)
    if not _RUN_ID.fullmatch(run_id):
        raise errors.RunNotFound.of(run_id, field=field)
    return run_id


def is_run_id(name: str) -> bool:
    """Return whether a name has the form of a run id."""
    return _RUN_ID.fullmatch(name) is not None


def new_run_id() -> str:
    """Generate the id of a new run."""
    return f"run-{uuid4().hex}"


class Volume:
    """A checkpoint volume."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs"
        """Folder of all runs."""

    def run(self, run_id: str) -> Path:
        """Folder of a run."""
        return self.runs / check_run_id(run_id)

    def checkpoint(self, path: CheckpointPath) -> Path:
        """Folder of a checkpoint."""
        return self.run(path.run_id) / path.kind.folder / path.name

    def version(self, run_id: str, version: int) -> Path:
        """Folder of a version."""
        return self.run(run_id) / "versions" / str(version)

    def run_ids(self) -> list[str]:
        """Return the ids of the runs that have a folder."""
        return [folder.name for folder in run_folders(self.runs)]

    def checkpoints(self, run_id: str = "", kind: CheckpointKind | None = None) -> Iterator[CheckpointPath]:
        """Yield the directories that have a checkpoint's name, of one run or of all, of one kind or of both.

        Raises OSError if a folder of that run cannot be listed; of all runs, those that cannot be listed are skipped.
        """
        for run in [run_id] if run_id else self.run_ids():
            for each in CheckpointKind if kind is None else (kind,):
                try:
                    found = list(filter(_is_own_folder, entries(self.run(run) / each.folder)))
                except OSError:
                    if run_id:
                        raise
                    continue  # it concerns no other run
                yield from (CheckpointPath(run, each, path.name) for path in found if _NAME.fullmatch(path.name))


@contextmanager
def new_directory(final: Path, *, overwrite: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield an empty staging directory that becomes `final` if the block succeeds and is removed if it raises.

    Readers see the whole directory or none. With `durable`, files and folders are synced first. Raises FileExistsError
    if `final` exists and `overwrite` is false, DiskFull if the volume is full.
    """
    if final.exists() and not overwrite:
        raise FileExistsError(final)
    staging = final.parent / f"{STAGED}{uuid4().hex}"
    if durable:
        make_folder(final.parent)
    try:
        staging.mkdir(parents=True)
        yield staging
        if durable:
            _sync_files(staging)
        replaced = _replace(staging, final)
        if durable:
            sync_directory(final.parent)
        if replaced is not None:  # only once the rename of its successor is durable
            shutil.rmtree(replaced)
    except OSError as error:
        raise translate_os_error(error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@asynccontextmanager
async def new_directory_async(final: Path, *, overwrite: bool = False, durable: bool = True) -> AsyncIterator[Path]:
    """Async version of `new_directory`, whose file operations do not block the event loop.

    Without `durable` they run on the event loop, because they take less time than starting a thread.
    """
    manager = new_directory(final, overwrite=overwrite, durable=durable)
    if not durable:
        with manager as staging:
            yield staging
        return
    staging = await asyncio.to_thread(manager.__enter__)
    try:
        yield staging
    except BaseException:
        if not await asyncio.to_thread(manager.__exit__, *sys.exc_info()):
            raise
    else:
        await asyncio.to_thread(manager.__exit__, None, None, None)


@contextmanager
def opened(directory: Path) -> Iterator[Path]:
    """Yield a path to the current `directory` that stays valid if it is replaced or its files are removed.

    The path is valid in this process until the block ends. Raises FileNotFoundError, and NotADirectoryError, also if
    the directory or the one that holds it is a link.
    """
    descriptor = _open_directory(directory)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _is_own_folder(path: Path) -> bool:
    """Whether a path is a folder and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _open_directory(directory: Path) -> int:
    with suppress(FileNotFoundError):
        return open_folder(directory)
    # It may be between the two renames of `_replace`.
    for old in entries(directory.parent, f".old-{'?' * 32}.{directory.name}"):
        with suppress(FileNotFoundError):
            return open_folder(old)
    return open_folder(directory)


def link_files(source: Path, target: Path) -> None:
    """Hard-link every file of a directory into another; copy if the file system cannot link. Raises NotRegularFile."""
    for path in source.iterdir():
        try:
            link_file(path, target / path.name)
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}:
                raise
            copy_file(path, target / path.name)


def write_file(final: Path, data: bytes) -> None:
    """Write a file durably and atomically: readers see the old content or the new. Raises DiskFull."""
    with new_file(final) as file:
        file.write(data)


@contextmanager
def new_file(final: Path) -> Iterator[BinaryIO]:
    """Yield an empty file that durably becomes `final` if the block succeeds and is removed if it raises.

    Readers see the old content or the new. Raises DiskFull.
    """
    staging = final.parent / f"{STAGED}{uuid4().hex}"
    try:
        with staging.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        staging.replace(final)
        sync_directory(final.parent)
    except OSError as error:
        raise translate_os_error(error) from error
    finally:
        staging.unlink(missing_ok=True)


def remove_directory(final: Path) -> None:
    """Remove a directory durably; readers see the whole directory or none."""
    trash = final.parent / f".old-{uuid4().hex}"
    final.rename(trash)
    sync_directory(final.parent)  # otherwise it could reappear after a crash, without some of its files
    shutil.rmtree(trash)


def entries(folder: Path, pattern: str = "*") -> list[Path]:
    """Return a folder's entries whose names match `pattern`, sorted; none if the folder does not exist.

    Raises OSError if it cannot be listed; `Path.glob` finds nothing then, as if the folder were empty.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are matched, and not all become paths
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def run_folders(runs: Path) -> list[Path]:
    """Return the folders of runs among the entries of `runs`, sorted; other entries are skipped."""
    return [folder for folder in entries(runs, "run-*") if is_run_id(folder.name)]


def numbered(folder: Path) -> list[int]:
    """Return the numbers among the names of a folder's entries; other entries, such as 007, are skipped."""
    names = (path.name for path in entries(folder, "[0-9]*"))
    return [int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name))]


def quarantine(path: Path) -> Path:
    """Rename a damaged file or directory durably, so that it is not read again; return its new path.

    It is kept, because its content may still be of use.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    sync_directory(path.parent)
    return aside


def find_quarantined(folder: Path) -> list[str]:
    """Return the paths, relative to a run's folder, of what was set aside in it and in its subfolders.

    Checkpoint folders are skipped: checkpoints are never set aside, and users choose their names. So is a subfolder
    that cannot be listed. Raises OSError if the run's folder cannot.
    """
    checkpoints = {kind.folder for kind in CheckpointKind}
    found = entries(folder, "*.damaged-*")
    for part in entries(folder):
        if part.name not in checkpoints:
            with suppress(OSError):
                found += entries(part, "*.damaged-*")
    return sorted(str(path.relative_to(folder)) for path in found)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably. Data synced inside it would be lost if its own name were not synced."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_directory(folder.parent)


def sweep(folder: Path) -> None:
    """Clean up after a crash in `folder`: remove staging directories, restore what was being replaced."""
    for left in entries(folder, ".old-*"):
        _, _, name = left.name.removeprefix(".old-").partition(".")
        if name and not (folder / name).exists():
            left.rename(folder / name)
    for left in (*entries(folder, f"{STAGED}*"), *entries(folder, ".old-*")):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write all of `content` at an open file's position; a single `os.write` may be short."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_file(file: Path) -> None:
    """Make a file's contents durable."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(staging: Path, final: Path) -> Path | None:
    """Rename `staging` to `final`; return the path of the directory that it replaced, if any."""
    if not final.exists():
        staging.rename(final)
        return None
    if _exchange(staging, final):
        return staging
    old = final.parent / f".old-{uuid4().hex}.{final.name}"
    final.rename(old)
    staging.rename(final)
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the file system does not support it. Raises OSError."""
    if not _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    error = ctypes.get_errno()
    if error in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


def _sync_files(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def translate_os_error(error: OSError) -> Exception:
    """Return DiskFull for a full volume, quota or file size limit; return any other error unchanged."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return errors.DiskFull("the checkpoint volume is full; delete checkpoints or grow it")
    return error

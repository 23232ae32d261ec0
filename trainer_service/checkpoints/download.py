"""Stream the files of a checkpoint one after the other, all as they were when the download started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline import errors, layout

_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileBegins:
    """Announces a file; the parts that follow are its bytes."""

    name: str
    size_bytes: int


async def parts(directory: Path, only: str = "", *, with_data: bool = True) -> AsyncIterator[FileBegins | bytes]:
    """Yield a FileBegins and then the bytes of each file of a checkpoint, or of the file named `only`.

    All files are from one save, even if the checkpoint is overwritten or deleted meanwhile. Raises CheckpointNotFound,
    also if the checkpoint has no such file.
    """
    with ExitStack() as opened:
        files = await asyncio.to_thread(_open_all, directory, opened)
        chosen = {name: file for name, file in files.items() if only in {"", name}}
        if not chosen:
            raise errors.CheckpointNotFound(f"has no such file; it has {', '.join(files)}", field="file")
        for name, file in chosen.items():
            yield FileBegins(name, await asyncio.to_thread(_size_of, file))
            while with_data and (part := await asyncio.to_thread(file.read, _PART_BYTES)):
                yield part


def _open_all(directory: Path, stack: ExitStack) -> dict[str, BinaryIO]:
    """Open the files of one save, sorted by name."""
    while True:
        files: dict[str, BinaryIO] = {}
        with ExitStack() as trying:
            try:
                with layout.opened(directory) as folder:
                    for path in sorted(folder.iterdir()):
                        files[path.name] = trying.enter_context(path.open("rb"))
                    is_whole = folder.samefile(directory)
            except FileNotFoundError as error:
                if directory.exists():
                    continue  # overwritten meanwhile
                raise errors.CheckpointNotFound("no such checkpoint", field="path") from error
            if is_whole:
                stack.enter_context(trying.pop_all())
                return files


def _size_of(file: BinaryIO) -> int:
    size = file.seek(0, 2)
    file.seek(0)
    return size

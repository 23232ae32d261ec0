"""Snapshots of a run, from which its journal is replayed.

<run>/snapshots/<seq_id>/   the files that the engine's save_state wrote, answers, counters.json, SHA256SUMS
<run>/loads/<seq_id>/       links to the checkpoint that command `seq_id` loads, so that a replay finds the same files
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline import layout
from paceline.files.regular_files import read_file
from paceline.log import get_logger
from paceline.weights import Sums, find_damaged, write_sums
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import (
    AnswerRecord,
    Counters,
    JournalDamagedError,
    Record,
    decode_records,
    encode_records,
)
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.volume_files import UnknownFormatError

_ANSWERS, _COUNTERS = "answers", "counters.json"
_MAGIC = b"PACEANS1"
_KEPT = 2
"""Number of snapshots kept per run, so that damage to the newest costs only a longer replay."""
OWN_FILES = frozenset({_ANSWERS, _COUNTERS, Sums.SHA256.value})
"""Files of a snapshot that the engine did not write."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's state after command `seq_id`."""

    seq_id: int
    directory: Path
    counters: Counters
    answers: list[AnswerRecord]
    """Answers to that command and earlier ones, as far as they are kept."""


class SnapshotStore:
    """One run's snapshots."""

    def __init__(self, run_directory: Path, failpoints: Failpoints, guard: DiskGuard) -> None:
        self._directory = run_directory
        self._guard = guard
        self._root = run_directory / "snapshots"
        self._loads = run_directory / "loads"
        self._failpoints = failpoints

    def newest(self) -> Snapshot | None:
        """Read and verify the newest intact snapshot; set damaged ones aside.

        Raises UnknownFormatError, or OSError if one cannot be read at the moment, which does not mean it is damaged.
        """
        for seq_id in sorted(layout.numbered(self._root), reverse=True):
            directory = self._root / str(seq_id)
            try:
                return self._read(seq_id, directory)
            except JournalDamagedError as damage:
                aside = layout.quarantine(directory)
                _log.error(
                    "snapshot damaged and set aside", run=self._directory.name, aside=aside.name, damage=str(damage)
                )
        return None

    @staticmethod
    def _read(seq_id: int, directory: Path) -> Snapshot:
        try:
            if name := find_damaged(directory):
                raise JournalDamagedError(f"{seq_id}/{name} is damaged")
            counters = msgspec.json.decode(read_file(directory / _COUNTERS), type=Counters)
            records = _decode_answers(read_file(directory / _ANSWERS))
        except (FileNotFoundError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise JournalDamagedError(f"snapshot {seq_id} cannot be read: {error}") from error
        answers = [record for record in records if isinstance(record, AnswerRecord)]
        return Snapshot(seq_id, directory, counters, answers)

    async def save(
        self, seq_id: int, size: int, write: Callable[[Path], Awaitable[tuple[Counters, list[AnswerRecord]]]]
    ) -> None:
        """Durably make a snapshot. `write` saves the run's state of `size` bytes and returns its counters and answers.

        Raises the error of `write`, or DiskFull.
        """
        self._guard.check_free(self._directory, size)
        async with layout.new_directory_async(self._root / str(seq_id)) as staging:
            counters, answers = await write(staging)
            await asyncio.to_thread(_seal, staging, counters, answers)
            self._failpoints.hit("during_snapshot")
        self._guard.measure(self._root / str(seq_id))
        self._failpoints.hit("after_snapshot")

    def drop_old(self) -> int:
        """Remove old snapshots; return the last command that no replay needs: 0 until there is a snapshot to spare."""
        numbers = sorted(layout.numbered(self._root))
        self._remove([self._root / str(number) for number in numbers[:-_KEPT]])
        return numbers[-_KEPT] if len(numbers) >= _KEPT else 0

    def unpin(self, before: int) -> None:
        """Remove the checkpoints kept for commands before `before`, which the journal no longer holds.

        Earlier they must not go: if every snapshot is damaged, the whole journal is replayed.
        """
        self._remove([self._loads / str(number) for number in layout.numbered(self._loads) if number < before])

    def drop_pin(self, seq_id: int) -> None:
        """Remove the checkpoint kept for a command that was refused, which no replay executes."""
        self._remove([self._loads / str(seq_id)])

    def _remove(self, directories: list[Path]) -> None:
        for directory in directories:
            layout.remove_directory(directory)
            self._guard.measure(directory)

    async def pin(self, seq_id: int, take: Callable[[Path], Awaitable[None]]) -> Path:
        """Keep the checkpoint that `take` puts into a directory, for replays of the command that loads it.

        Returns its directory. Raises the error of `take`, or DiskFull.
        """
        pinned = self._loads / str(seq_id)
        if not pinned.exists():
            async with layout.new_directory_async(pinned) as staging:
                await take(staging)
            self._guard.measure(pinned)
        return pinned

    def pinned(self, seq_id: int) -> Path | None:
        """Return the directory of the checkpoint kept for a command, or None."""
        directory = self._loads / str(seq_id)
        return directory if directory.exists() else None


def _seal(directory: Path, counters: Counters, answers: list[AnswerRecord]) -> None:
    (directory / _COUNTERS).write_bytes(msgspec.json.encode(counters))
    (directory / _ANSWERS).write_bytes(_MAGIC + encode_records(answers))
    write_sums(directory)


def _decode_answers(data: bytes) -> list[Record]:
    """Decode answers whose checksum was already verified."""
    magic = data[: len(_MAGIC)]
    if magic != _MAGIC:
        raise UnknownFormatError(f"answers have unknown format {magic!r}")
    return decode_records(data[len(_MAGIC) :])

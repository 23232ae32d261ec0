"""Location of a run's journal and snapshots, and reading them at startup and for replay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline import layout
from paceline.log import get_logger
from paceline.requests.waiting_bytes import WaitingBytes
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import Counters, JournalDamagedError
from trainer_service.journal.history import (
    History,
    check_formats,
    highest_seq_id,
    index_path,
    read_history,
    read_index,
    segments,
)
from trainer_service.journal.journal import RunJournal
from trainer_service.journal.snapshots import Snapshot, SnapshotStore
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.runs.command import Answers, Command
from trainer_service.runs.sequencer import Sequencer
from trainer_service.settings import TrainerSettings
from trainer_service.volume_files import UnknownFormatError

_JOURNAL = "journal"
_SYNCING_THREADS = 8
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredCommands:
    """A run's commands as stored on the volume."""

    snapshot: Snapshot | None
    history: History

    @property
    def first(self) -> int:
        """First command to replay: the one after the snapshot, or the newest load that succeeded."""
        after = self.snapshot.seq_id + 1 if self.snapshot else self.history.base
        loads = [seq_id for seq_id, command in self.history.commands.items() if command.method == "LoadCheckpoint"]
        return max([after, *(seq_id for seq_id in loads if self.succeeded(seq_id))])

    @property
    def unanswered(self) -> list[int]:
        """Commands without an answer; later ones may have one."""
        after = self.snapshot.seq_id if self.snapshot else 0
        return [seq_id for seq_id in self.history.commands if seq_id > after and seq_id not in self.history.answers]

    @property
    def has_state(self) -> bool:
        """Whether the run's state can be rebuilt."""
        first = self.history.commands.get(self.first)
        is_load = first is not None and first.method == "LoadCheckpoint" and self.succeeded(self.first)
        return self.snapshot is not None or is_load or self.history.base == 1

    @property
    def counters(self) -> Counters | None:
        """The run's newest counters, with those that depend on the order as of the last answered command in it."""
        answers, snapshot = self.history.answers, self.snapshot
        if not answers:
            return snapshot.counters if snapshot else None
        last = max(answers)
        place = snapshot.counters if snapshot and last <= snapshot.seq_id else answers[last].counters
        return next(reversed(answers.values())).counters.at(place)

    def counters_before(self, seq_id: int) -> Counters:
        """Return the counters before a command in the run's order."""
        place = max((answered for answered in self.history.answers if answered < seq_id), default=0)
        if self.snapshot and place <= self.snapshot.seq_id:
            return self.snapshot.counters
        return self.history.answers[place].counters if place else Counters()

    @property
    def executed(self) -> int:
        """Highest seq_id that was answered."""
        after_snapshot = self.snapshot.seq_id if self.snapshot else self.history.base - 1
        return max([after_snapshot, *self.history.answers])

    def succeeded(self, seq_id: int) -> bool:
        """Return whether a command was answered with a reply."""
        answer = self.history.answers.get(seq_id)
        return answer is not None and answer.failure is None


class RunStorage:
    """Creates and reads the journals and snapshots of runs."""

    def __init__(
        self,
        volume: layout.Volume,
        settings: TrainerSettings,
        failpoints: Failpoints,
        waiting_bytes: WaitingBytes,
        guard: DiskGuard,
    ) -> None:
        self._volume = volume
        self._settings = settings
        self._failpoints = failpoints
        self._guard = guard
        self._waiting_bytes = waiting_bytes
        self._threads = ThreadPoolExecutor(_SYNCING_THREADS, thread_name_prefix="journal")

    def create(self, run_id: str) -> StoredCommands:
        """Create a new run's folder and journal. Raises DiskFull."""
        folder = self._volume.run(run_id)
        layout.make_folder(folder)
        RunJournal.create(folder / _JOURNAL, base=1)
        return self.read(run_id)

    def is_empty(self, run_id: str) -> bool:
        """Return whether a run's folder holds at most a journal that never accepted a command. Raises OSError.

        A CreateRun that is killed before it writes the run's file leaves such a folder: no caller got the run.
        """
        folder = self._volume.run(run_id)
        directory = folder / _JOURNAL
        own = {directory.name, index_path(directory).name}
        if any(path.name not in own and not path.name.startswith(layout.STAGED) for path in folder.iterdir()):
            return False
        try:
            history = read_history(directory) if directory.exists() else History(1)
        except (JournalDamagedError, UnknownFormatError):
            return False
        is_torn = history.end is not None and history.end.good_bytes != history.end.size
        return not is_torn and (history.base, history.last_seq_id, len(history.answers)) == (1, 0, 0)

    def snapshots(self, run_id: str) -> SnapshotStore:
        """Return a run's snapshot store."""
        return SnapshotStore(self._volume.run(run_id), self._failpoints, self._guard)

    def journal_bytes(self, run_id: str) -> int:
        """Return the size of a run's journal in bytes, which is about the memory that its content takes once read."""
        return sum(path.stat().st_size for path in segments(self._volume.run(run_id) / _JOURNAL).values())

    def read(self, run_id: str) -> StoredCommands:
        """Read a run's newest intact snapshot, and what its journal holds after that.

        Raises JournalDamagedError, UnknownFormatError before anything is touched, or OSError if something cannot be
        read at present.
        """
        directory = self._volume.run(run_id) / _JOURNAL
        check_formats(directory)
        index = read_index(directory)
        snapshot = self.snapshots(run_id).newest()
        history = read_history(directory, snapshot.seq_id if snapshot else 0, index.newest if index else None)
        # A snapshot that is older than the journal, which was started over, does not belong to it.
        is_reached = snapshot is not None and snapshot.seq_id >= history.base - 1
        return StoredCommands(snapshot if is_reached else None, history)

    def read_or_restart(self, run_id: str, last_seq_id: int) -> StoredCommands:
        """Read a run's snapshot and journal; if the journal is damaged, set it aside and start one without state.

        Nothing is deleted. Raises UnknownFormatError, OSError, and DiskFull.
        """
        try:
            self._sync_journal(run_id)
            return self.read(run_id)
        except JournalDamagedError as damage:
            folder = self._volume.run(run_id)
            _log.error("run's state lost: its journal cannot be replayed", run=run_id, damage=str(damage))
            base = max(last_seq_id, self._highest_accepted(run_id)) + 1
            if (folder / _JOURNAL).exists():
                layout.quarantine(folder / _JOURNAL)
            # A base of 1 would mean that the run's state can be rebuilt from the journal.
            RunJournal.create(folder / _JOURNAL, base=max(base, 2))
            return self.read(run_id)

    def _sync_journal(self, run_id: str) -> None:
        """Make durable what a process that was killed has written and not synced: it is executed and answered now.

        That includes the names of the segments, and of the journal and the other parts of the run's folder.
        """
        folder = self._volume.run(run_id)
        if found := segments(folder / _JOURNAL):
            for path in found.values():
                layout.sync_file(path)
            layout.sync_directory(folder / _JOURNAL)
        layout.sync_directory(folder)

    def _highest_accepted(self, run_id: str) -> int:
        """Return a seq_id above which no command of a run with a damaged journal was accepted."""
        directory = self._volume.run(run_id) / _JOURNAL
        index, snapshot = read_index(directory), self.snapshots(run_id).newest()
        highest = highest_seq_id(directory, index.newest if index else None)
        if highest is None:
            highest = index.limit if index else 0
        return max(highest, snapshot.seq_id if snapshot else 0)

    def open(self, run_id: str, tenant: str, past: StoredCommands) -> Sequencer:
        """Build the sequencer of a tenant's run, with its past answers and the commands that are still to execute."""
        answers, first = Answers(), 1
        if past.snapshot is not None:
            first = past.snapshot.seq_id + 1
            for record in past.snapshot.answers:
                answers.keep(record)
        for seq_id, record in past.history.answers.items():
            if seq_id >= first:
                answers.keep(record)
        directory = self._volume.run(run_id) / _JOURNAL
        sequencer = Sequencer(
            RunJournal(directory, past.history, self._threads, self._failpoints, self._guard),
            answers,
            past.executed,
            gap_wait_seconds=self._settings.gap_wait_seconds,
            max_attempts=self._settings.max_attempts,
            failpoints=self._failpoints,
            tenant=tenant,
            waiting_bytes=self._waiting_bytes,
        )
        sequencer.attempts = past.history.attempts
        for seq_id in past.unanswered:
            is_cancelled = seq_id in past.history.cancelled
            sequencer.restore(Command.from_record(past.history.commands[seq_id], is_cancelled=is_cancelled))
        return sequencer

    def close(self) -> None:
        """Shut down the threads."""
        self._threads.shutdown()

"""Answers of a run's commands, kept so that a repeated command gets its first answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from paceline import errors
from trainer_service.journal.records import AnswerRecord, Facts
from trainer_service.runs.command import Answer, answer_from_record

_KEPT_BYTES = 64 << 20
"""Bytes of answers kept per run; the newest is kept whatever its size."""
_KEPT_DIGESTS = 10_000
"""Digests kept per run, to tell a repeated command from a reused seq_id after its answer was dropped."""


class Answers:
    """The newest answers of a run."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, AnswerRecord] = OrderedDict()
        self._reply_bytes: OrderedDict[int, int] = OrderedDict()
        """Sizes of the replies that are kept, by seq_id."""
        self._kept_bytes = 0

    def __iter__(self) -> Iterator[AnswerRecord]:
        return iter(list(self._records.values()))

    def keep(self, record: AnswerRecord) -> None:
        """Keep an answer and drop the oldest ones beyond the limits."""
        seq_id = record.seq_id
        self._drop_reply(seq_id)
        self._records[seq_id] = record
        self._reply_bytes[seq_id] = len(record.reply or b"")
        self._kept_bytes += self._reply_bytes[seq_id]
        while self._kept_bytes > _KEPT_BYTES and len(self._reply_bytes) > 1:
            self._drop_reply(next(iter(self._reply_bytes)))
        while len(self._records) > _KEPT_DIGESTS:
            oldest = next(iter(self._records))
            self._drop_reply(oldest)
            del self._records[oldest]

    def knows(self, seq_id: int, digest: bytes) -> bool:
        """Return whether this exact command was executed, as far as answers are still remembered."""
        record = self._records.get(seq_id)
        return record is not None and record.digest == digest

    def facts(self, seq_id: int) -> Facts | None:
        """Return the facts that the journal keeps with an answer; None if the answer is not known."""
        record = self._records.get(seq_id)
        return None if record is None else record.facts

    def again(self, seq_id: int, digest: bytes, last_seq_id: int) -> Answer:
        """Return the answer of an executed command. Raises SeqIdReused, SeqIdExpired."""
        record = self._records.get(seq_id)
        if record is not None:
            check_digest(digest, record.digest)
        answer = None if record is None else answer_from_record(record)
        if answer is None:
            raise errors.SeqIdExpired(
                f"was executed, but its answer is no longer kept; go on from {last_seq_id + 1}",
                field="seq_id",
                metadata={"last_seq_id": str(last_seq_id)},
            )
        return answer

    def _drop_reply(self, seq_id: int) -> None:
        if seq_id in self._reply_bytes:
            self._kept_bytes -= self._reply_bytes.pop(seq_id)
            self._records[seq_id] = msgspec.structs.replace(self._records[seq_id], reply=None)


def check_digest(given: bytes, known: bytes) -> None:
    """Raise SeqIdReused unless both digests are of the same command."""
    if given != known:
        raise errors.SeqIdReused("was used with another payload; take the next one", field="seq_id")

"""What survives the gateway of a session: which request has no answer yet, and where its commands are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.http.database import Database

_FORMAT = 1
_TABLES = """
CREATE TABLE unanswered (tenant TEXT NOT NULL, run_id TEXT NOT NULL, digest BLOB NOT NULL, seq_id INTEGER NOT NULL,
    PRIMARY KEY (tenant, run_id));
"""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A request that was sent to the trainer and not answered."""

    digest: bytes
    """SHA-256 of its commands, without their numbers."""
    seq_id: int
    """Number of its first command."""


class UnansweredRequests(Database):
    """The last request of each session that has no answer, so that the next gateway knows it when it comes again."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StateUnusable, and InvalidArgument for another format."""
        super().__init__(path, _FORMAT, _TABLES)

    def find(self, tenant: str, run_id: str) -> Unanswered | None:
        """Return a session's unanswered request, if there is one. Raises StateUnusable."""
        row = self.row("SELECT digest, seq_id FROM unanswered WHERE tenant = ? AND run_id = ?", tenant, run_id)
        return Unanswered(*row) if row else None

    async def put(self, tenant: str, run_id: str, request: Unanswered) -> None:
        """Note a request before it is sent. Raises StateUnusable."""
        sql = "INSERT OR REPLACE INTO unanswered (tenant, run_id, digest, seq_id) VALUES (?, ?, ?, ?)"
        await self.write(sql, tenant, run_id, request.digest, request.seq_id)

    async def remove(self, tenant: str, run_id: str) -> None:
        """Forget a request whose answer is known. Raises StateUnusable."""
        await self.write("DELETE FROM unanswered WHERE tenant = ? AND run_id = ?", tenant, run_id)

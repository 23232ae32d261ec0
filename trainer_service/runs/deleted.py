"""Which requests made runs that were deleted since: repeated late, they must not make another."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec

from paceline import layout

_FILE = "deleted-runs.json"
_KEPT = 1_000
"""Requests that are kept, the newest."""


class _Request(msgspec.Struct, frozen=True):
    tenant: str
    request_id: str
    digest: str


class DeletedRuns:
    """The CreateRun requests of deleted runs, on the volume."""

    def __init__(self, root: Path) -> None:
        self._path = root / _FILE
        self._requests: OrderedDict[tuple[str, str], str] = OrderedDict()

    def read(self) -> None:
        """Read them from the volume."""
        if self._path.exists():
            known = msgspec.json.decode(self._path.read_bytes(), type=list[_Request])
            self._requests.update({(request.tenant, request.request_id): request.digest for request in known})

    def add(self, tenant: str, request_id: str, digest: str) -> None:
        """Keep a request, durably. Raises DiskFull."""
        self._requests[tenant, request_id] = digest
        while len(self._requests) > _KEPT:
            self._requests.popitem(last=False)
        kept = [_Request(*key, digest) for key, digest in self._requests.items()]
        layout.write_file(self._path, msgspec.json.encode(kept))

    def find(self, tenant: str, request_id: str) -> str:
        """Return the digest of a tenant's request; empty if it is not known."""
        return self._requests.get((tenant, request_id), "")

"""Requests that created runs which were later deleted: repeating one must not create another run."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec

from paceline import layout
from paceline.log import get_logger
from trainer_service.volume.checked_file import DamagedFileError, decode_checked, write_checked

_log = get_logger(__name__)

_FILE = "deleted-runs.json"
_KEPT = 1_000
"""Newest requests kept per tenant."""


class _Request(msgspec.Struct, frozen=True):
    tenant: str
    request_id: str
    digest: str


class DeletedRuns:
    """The CreateRun requests of deleted runs, stored on the volume."""

    def __init__(self, root: Path) -> None:
        self._path = root / _FILE
        self._requests: OrderedDict[tuple[str, str], str] = OrderedDict()

    def read(self) -> None:
        """Read the requests from the volume. Raises UnknownFormatError."""
        if not self._path.exists():
            return
        try:
            known = self._decode(self._path.read_bytes())
        except (DamagedFileError, msgspec.MsgspecError) as error:
            aside = layout.quarantine(self._path)
            _log.error("requests of deleted runs damaged and set aside", aside=aside.name, error=str(error))
            return
        self._requests.update({(request.tenant, request.request_id): request.digest for request in known})

    @staticmethod
    def _decode(text: bytes) -> list[_Request]:
        if text.startswith(b"["):  # format 1
            return msgspec.json.decode(text, type=list[_Request])
        return decode_checked(text, list[_Request], _FILE)

    def add(self, tenant: str, request_id: str, digest: str) -> None:
        """Store a request durably. Raises DiskFull."""
        self._requests[tenant, request_id] = digest
        of_tenant = [key for key in self._requests if key[0] == tenant]
        for oldest in of_tenant[:-_KEPT]:
            del self._requests[oldest]
        self.write()

    def write(self) -> None:
        """Write the known requests durably. Raises DiskFull."""
        kept = [_Request(*key, digest) for key, digest in self._requests.items()]
        write_checked(self._path, kept)

    def find(self, tenant: str, request_id: str) -> str:
        """Return the digest of a tenant's request; empty if the request is not known."""
        return self._requests.get((tenant, request_id), "")

"""Checkpoint files, at signed URLs that need no API key.

A URL names one file and the key that asked for it. It ends after an hour, with the key, or with the machine's uptime,
whichever is first, and counts as a request of the key's tenant.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import tarfile
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from fastapi import APIRouter, Request

from gateway.admission import Authenticator
from gateway.http.services import Services
from gateway.http.state import in_state
from gateway.http.streaming import StreamedResponse
from paceline import errors
from paceline.files.regular_files import read_file
from paceline.files.secret_files import write_secret
from paceline.layout import CheckpointPath
from paceline.rpc.identity import Identity
from paceline.steady_clock import Machine
from paceline.trainer.v1 import trainer_service_pb2 as pb

PREFIX = "/api/v1/downloads/"
"""Path prefix of file URLs, which stand for the key that asked for them."""
ARCHIVE = "checkpoint.tar"
_VALID = timedelta(hours=1)
_SECONDS = 3600.0
_SECRET_BYTES = 32
MOST_DOWNLOADS = 16
"""Most downloads of a tenant in progress: as many as the trainer's default for `max_downloads_per_tenant`."""
_RETRY_SECONDS = 1.0
_NO_MORE = b"\0" * 1024
"""The end of a tar archive."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The access that a URL grants: a file of a tenant's checkpoint, until the URL expires."""

    tenant: str
    key_name: str
    credential: str
    path: str
    file: str
    boot: str
    expires: float
    """Seconds of the machine's uptime, which nobody can set; they mean nothing in another boot."""

    @property
    def identity(self) -> Identity:
        """Who asked for the URL."""
        return Identity(self.tenant, self.key_name, self.credential)


class Downloads:
    """Signs URLs and serves the files that they name."""

    def __init__(
        self,
        services: Services,
        secret: bytes,
        public_url: str = "",
        authenticators: Sequence[Authenticator] = (),
        machine: Machine | None = None,
    ) -> None:
        """`public_url` is where clients reach this gateway; empty means the URL that they called."""
        self._services = services
        self._secret = secret
        self._public_url = public_url
        self._authenticators = authenticators
        self._machine = machine or Machine.here()
        self._boot = self._machine.boot or uuid4().hex
        self._running: Counter[str] = Counter()
        """Downloads in progress, by tenant."""

    def address(self, request: Request, identity: Identity, path: CheckpointPath, file: str) -> tuple[str, datetime]:
        """Return the URL of a checkpoint's file, as the caller reaches this gateway, and when the URL expires."""
        end = self._machine.uptime() + _VALID.total_seconds()
        key = identity.tenant, identity.key_name, identity.credential
        token = self._sign(Grant(*key, str(path), file, self._boot, end))
        base = (self._public_url or str(request.base_url)).rstrip("/")
        return f"{base}{PREFIX}{token}/{quote(file)}", datetime.now(UTC) + _VALID

    def identify(self, path: str) -> Identity:
        """Return who asked for the URL with this path. Raises MethodNotAllowed if it is not valid, or no longer."""
        token, _, file = path.removeprefix(PREFIX).partition("/")
        return self._read(token, file).identity

    async def files(self, tenant: str, path: CheckpointPath) -> dict[str, int]:
        """Return the files of a checkpoint and their sizes. Raises CheckpointNotFound."""
        message = pb.DownloadCheckpointRequest(path=str(path), without_data=True)
        async with self._services.stream(tenant, message, pb.DownloadCheckpointResponse) as replies:
            return {reply.file.name: reply.file.size_bytes async for reply in replies}

    def routes(self) -> APIRouter:
        """Return the routes below /api/v1."""
        router = APIRouter()

        @router.get("/downloads/{token}/{file}")
        async def download(token: str, file: str) -> StreamedResponse:
            grant = self._read(token, file)
            async with AsyncExitStack() as resources:
                resources.enter_context(self.counted(grant.tenant))
                sizes = await self.files(grant.tenant, CheckpointPath.parse(grant.path))
                if file == ARCHIVE:
                    return StreamedResponse(self._archive(grant), resources.pop_all(), media_type="application/x-tar")
                if file not in sizes:
                    raise errors.CheckpointNotFound("has no such file", field="file")
                headers = {"Content-Length": str(sizes[file])}
                kind = "application/octet-stream"
                return StreamedResponse(self._file(grant, file), resources.pop_all(), headers=headers, media_type=kind)

        return router

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """Count a download while the block runs. Raises Overloaded if the tenant has too many.

        A download that nobody reads holds a place among the gateway's calls, and among the trainer's downloads.
        """
        if self._running[tenant] >= MOST_DOWNLOADS:
            message = (
                f"{MOST_DOWNLOADS} downloads of this tenant are in progress, as many as it may have: read them first"
            )
            raise errors.Overloaded(message, retry_after=_RETRY_SECONDS)
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    async def _file(self, grant: Grant, file: str) -> AsyncGenerator[bytes]:
        async with aclosing(self._parts(grant, file)) as parts:
            async for part in parts:
                if part.WhichOneof("part") == "data":
                    yield part.data

    async def _archive(self, grant: Grant) -> AsyncGenerator[bytes]:
        """Yield a tar archive of all files of one save."""
        padding = b""
        async with aclosing(self._parts(grant, "")) as parts:
            async for part in parts:
                if part.WhichOneof("part") == "data":
                    yield part.data
                    continue
                header = tarfile.TarInfo(part.file.name)
                header.size = part.file.size_bytes
                yield padding + header.tobuf()
                padding = b"\0" * (-header.size % tarfile.BLOCKSIZE)
        yield padding + _NO_MORE

    async def _parts(self, grant: Grant, file: str) -> AsyncGenerator[pb.DownloadCheckpointResponse]:
        message = pb.DownloadCheckpointRequest(path=grant.path, file=file)
        async with self._services.stream(
            grant.tenant, message, pb.DownloadCheckpointResponse, seconds=_SECONDS
        ) as replies:
            async for reply in replies:
                yield reply

    def _sign(self, grant: Grant) -> str:
        content = json.dumps(astuple(grant)).encode()
        return _text(content) + "." + _text(hmac.digest(self._secret, content, hashlib.sha256))

    def _read(self, token: str, file: str) -> Grant:
        """Return the grant of a file's URL. Raises MethodNotAllowed unless it was signed here and holds still."""
        try:
            content, signature = map(_bytes, token.split("."))
            is_ours = hmac.compare_digest(hmac.digest(self._secret, content, hashlib.sha256), signature)
        except ValueError:
            is_ours = False
        if is_ours and self._holds(grant := Grant(*json.loads(content)), file):
            return grant
        raise errors.MethodNotAllowed(
            "the URL has expired, its key was removed, or it is not one of this gateway's: request a new one"
        )

    def _holds(self, grant: Grant, file: str) -> bool:
        is_in_time = grant.boot == self._boot and self._machine.uptime() < grant.expires
        may_still = any(authenticator.still_admits(grant.identity) for authenticator in self._authenticators)
        return grant.file == file and is_in_time and may_still


def read_or_make_secret(path: Path) -> bytes:
    """Return the secret in a file, created on first use. The folder's lock keeps other gateways from writing it.

    Raises StateUnusable, and InvalidArgument for a file that is not a secret.
    """
    with in_state(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            secret = read_file(path)
        except FileNotFoundError:
            secret = secrets.token_bytes(_SECRET_BYTES)
            write_secret(path, secret)
    if len(secret) < _SECRET_BYTES or len(set(secret)) < _SECRET_BYTES // 2:
        raise errors.InvalidArgument(
            f"{path} is not a secret: it is too short or not random; remove it to have a new one created",
            field="http_state",
        )
    return secret


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

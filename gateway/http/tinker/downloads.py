"""Checkpoint files, at signed URLs that need no API key and expire."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import tarfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Request

from gateway.http.services import Services
from gateway.http.streaming import StreamedResponse
from paceline import errors
from paceline.layout import CheckpointPath
from paceline.secret_files import lock, write_secret
from paceline.trainer.v1 import trainer_service_pb2 as pb

PREFIX = "/api/v1/downloads/"
"""Path prefix of file URLs; no API key is needed below it."""
ARCHIVE = "checkpoint.tar"
_VALID = timedelta(hours=1)
_SECONDS = 3600.0
_SECRET_BYTES = 32
_NO_MORE = b"\0" * 1024
"""The end of a tar archive."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The access that a URL grants: a tenant's checkpoint, until the URL expires."""

    tenant: str
    path: str
    expires: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Downloads:
    """Signs URLs and serves the files that they name."""

    services: Services
    secret: bytes = field(repr=False)
    public_url: str
    """Where clients reach this gateway; empty means the URL that they called."""

    def address(self, request: Request, tenant: str, path: CheckpointPath, file: str) -> tuple[str, datetime]:
        """Return the URL of a checkpoint's file, as the caller reaches this gateway, and when the URL expires."""
        expires = datetime.now(UTC) + _VALID
        token = self._sign(Grant(tenant, str(path), expires.timestamp()))
        base = (self.public_url or str(request.base_url)).rstrip("/")
        return f"{base}{PREFIX}{token}/{quote(file)}", expires

    async def files(self, tenant: str, path: CheckpointPath) -> dict[str, int]:
        """Return the files of a checkpoint and their sizes. Raises CheckpointNotFound."""
        message = pb.DownloadCheckpointRequest(path=str(path), without_data=True)
        async with self.services.stream(tenant, message, pb.DownloadCheckpointResponse) as replies:
            return {reply.file.name: reply.file.size_bytes async for reply in replies}

    def routes(self) -> APIRouter:
        """Return the routes below /api/v1."""
        router = APIRouter()

        @router.get("/downloads/{token}/{file}")
        async def download(token: str, file: str) -> StreamedResponse:
            grant = self._read(token)
            sizes = await self.files(grant.tenant, CheckpointPath.parse(grant.path))
            if file == ARCHIVE:
                return StreamedResponse(self._archive(grant), media_type="application/x-tar")
            if file not in sizes:
                raise errors.CheckpointNotFound("has no such file", field="file")
            headers = {"Content-Length": str(sizes[file])}
            return StreamedResponse(self._file(grant, file), headers=headers, media_type="application/octet-stream")

        return router

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
        async with self.services.stream(
            grant.tenant, message, pb.DownloadCheckpointResponse, seconds=_SECONDS
        ) as replies:
            async for reply in replies:
                yield reply

    def _sign(self, grant: Grant) -> str:
        content = json.dumps([grant.tenant, grant.path, grant.expires]).encode()
        return _text(content) + "." + _text(hmac.digest(self.secret, content, hashlib.sha256))

    def _read(self, token: str) -> Grant:
        """Return the grant in a token. Raises MethodNotAllowed if it was not signed here or has expired."""
        try:
            content, signature = map(_bytes, token.split("."))
            is_ours = hmac.compare_digest(hmac.digest(self.secret, content, hashlib.sha256), signature)
        except ValueError:
            is_ours = False
        if is_ours:
            grant = Grant(*json.loads(content))
            if grant.expires > datetime.now(UTC).timestamp():
                return grant
        raise errors.MethodNotAllowed("the URL has expired or is not from this gateway; request a new one")


def read_or_make_secret(path: Path) -> bytes:
    """Return the secret in a file, created on first use. Raises InvalidArgument if there is none to be had."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock(path):
            if not path.exists():
                write_secret(path, secrets.token_bytes(_SECRET_BYTES))
            secret = path.read_bytes()
    except OSError as error:
        message = f"{error.filename} cannot be read or written: {error.strerror}; make room, or see its mode and owner"
        raise errors.InvalidArgument(message, field="http_state") from error
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

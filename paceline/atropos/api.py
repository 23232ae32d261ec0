"""Client of the Atropos API server (`run-api`), for its trainer."""

from __future__ import annotations

import gzip
import json
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

_TIMEOUT = 60.0
_POLL_SECONDS = 1.0


class AtroposApi:
    """Registers the trainer and pulls batches."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._registered: dict[str, object] = {}

    def wait(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait until the server answers; call `say` if it is not up yet. Raises ConnectionError after `seconds`."""
        end, told = time.monotonic() + seconds, False
        while True:
            try:
                self._call("/info")
            except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError) as error:
                if time.monotonic() > end:
                    message = f"no Atropos API server answers at {self.address}; start run-api, or give --atropos-url"
                    raise ConnectionError(message) from error
                if not told:
                    told = True
                    say(f"waiting up to {seconds:g} s for the Atropos API server (run-api) at {self.address}")
                time.sleep(_POLL_SECONDS)
            else:
                return

    def register(self, **settings: object) -> None:
        """Register this trainer, so that environments start. Raises ConnectionError if the server refuses."""
        self._registered = settings
        answer = self._call("/register", settings)
        if "uuid" not in answer:
            raise ConnectionError(f"the Atropos API server refused the trainer: {str(answer)[:200]}")

    def next_batch(self, step: int, say: Callable[[str], None]) -> list[Any]:
        """Wait for a batch and return its groups, which may be of any form; the server does not keep it.

        A server that was restarted knows no trainer and fails: it is told of this one again, at its `step`. Raises
        ConnectionError if it refuses.
        """
        told = False
        while True:
            answer: dict[str, Any] = {}
            try:
                answer = self._call("/batch")
            except urllib.error.HTTPError as error:
                if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise ConnectionError(f"the Atropos API server refuses GET /batch: {error}") from error
                if not told:
                    told = True
                    say(f"the Atropos API server fails ({error}); registering again, as after its restart")
                with suppress(urllib.error.URLError, ConnectionError, TimeoutError, ValueError):
                    self.register(**{**self._registered, "starting_step": step})
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass  # it is not up
            except ValueError as error:
                if not told:
                    told = True
                    say(f"the Atropos API server's batch is left out: {error}")
            if answer.get("status") == "error":
                raise ConnectionError(f"the Atropos API server has no trainer: {answer.get('message', '')}")
            if (batch := answer.get("batch")) and isinstance(batch, list):
                return batch
            time.sleep(_POLL_SECONDS)

    def _call(self, path: str, body: object = None) -> dict[str, Any]:
        """Return the answer of a call. Raises URLError, ConnectionError, TimeoutError, ValueError if it is no JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
        request = urllib.request.Request(f"{self.address}{path}", data, headers)  # noqa: S310 # the user's own address
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
                content = answer.read()
                is_compressed = answer.headers.get("Content-Encoding") == "gzip"
        except HTTPException as error:
            raise ConnectionError(f"the answer broke off: {error!r}") from error
        try:
            found = json.loads(gzip.decompress(content) if is_compressed else content)
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from error
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        return found

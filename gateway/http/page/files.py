"""The page's files: HTML, style and scripts, without a key and without anything from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response

PREFIX = "/ui"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Text of users cannot become HTML by mistake: the browser refuses innerHTML and the like.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304 while it is the same
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str

    def answer(self, request: Request) -> Response:
        """Return the file, or that the caller has it."""
        headers = {**_HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def _read() -> dict[str, _File]:
    """Return the files by their paths below `static`."""
    folder, found = Path(__file__).parent / "static", dict[str, _File]()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            tag = f'"{sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = _File(content, _TYPES[path.suffix], tag)
    return found


_FILES = _read()
PAGE_PATHS = ("/", PREFIX, f"{PREFIX}/", *(f"{PREFIX}/{name}" for name in _FILES))
"""Paths that need no key."""


def page_files() -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["page"])

    # One route for each file: the paths are then known names in the gateway's metrics, and no other path exists.
    def add(path: str, file: _File) -> None:
        async def answer(request: Request) -> Response:
            return file.answer(request)

        router.add_api_route(path, answer, methods=["GET", "HEAD"])

    for path in ("/", PREFIX, f"{PREFIX}/"):
        add(path, _FILES[INDEX])
    for name, file in _FILES.items():
        add(f"{PREFIX}/{name}", file)
    return router

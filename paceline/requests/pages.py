"""Pagination of lists, newest first. A page token holds the key of the last entry that was returned."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import TypeVar

from paceline import errors

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

T = TypeVar("T")


def page_of(items: Iterable[T], key: Callable[[T], str], page_size: int, page_token: str) -> tuple[list[T], str]:
    """Return one page of `items` in descending order of `key`, and the token of the next page (empty on the last).

    Keys must be distinct. Entries created between calls do not shift later pages. Raises InvalidPageToken.
    """
    size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    ordered = sorted(items, key=key, reverse=True)
    if page_token:
        last = _decode(page_token)
        ordered = [item for item in ordered if key(item) < last]
    page = ordered[:size]
    return page, _encode(key(page[-1])) if len(ordered) > size else ""


def _encode(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _decode(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise errors.InvalidPageToken(
            "is not one that a list returned; leave it empty for the first page", field="page_token"
        ) from error

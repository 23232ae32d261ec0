"""Requests of OpenAI's API, as engines answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sampler_service.engine.base import Adapter


class TextEndpoint(Enum):
    """Which call is meant. The values are those of the wire."""

    CHAT_COMPLETIONS = 1
    COMPLETIONS = 2


Place = Callable[[int, int, int], AbstractAsyncContextManager[None]]
"""Takes the tokens of a prompt, the number of completions and the most tokens of each; a context manager that waits for
the request's turn and holds it. Raises what the service refuses."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One call."""

    endpoint: TextEndpoint
    body: dict[str, Any]
    """Fields that are known, by name."""
    adapter: Adapter | None
    """None means the base model."""
    tenant: str
    place: Place
    see: Callable[[Iterable[float]], None]
    """Is shown the log-probabilities of sampled tokens, and raises where they must not be passed on."""

"""The base of all errors."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar
from uuid import uuid4


class Code(IntEnum):
    """Canonical gRPC status codes, kept here so that engines can raise errors without importing grpc."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class PacelineError(Exception):
    """Base of every error that crosses the wire.

    `message` is public: it names what is wrong and what to do, and holds no token, prompt or key.
    """

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    default_retry_after: ClassVar[float | None] = None

    def __init__(
        self, message: str, *, field: str = "", metadata: dict[str, str] | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = metadata or {}
        self.retry_after = self.default_retry_after if retry_after is None else retry_after

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class Internal(PacelineError):
    """An unexpected failure; `metadata["error_id"]` identifies it in the service's log."""

    @classmethod
    def unforeseen(cls) -> Internal:
        """Return an error with a new id; the caller logs the id together with the cause."""
        error_id = uuid4().hex
        return cls(f"internal error; the service's log has it under {error_id}", metadata={"error_id": error_id})

    @property
    def error_id(self) -> str:
        """The id of the error in the service's log; empty if nothing was logged."""
        return self.metadata.get("error_id", "")

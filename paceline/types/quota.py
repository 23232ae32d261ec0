"""A tenant's quota on a limited resource."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quota:
    """How much of a resource a tenant uses, and its limit."""

    name: str
    """Such as runs or volume_bytes; docs/operations.md lists them."""
    used: int
    limit: int
    """0 means no limit."""

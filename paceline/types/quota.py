"""What a tenant may have of something scarce."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a tenant has of something, and how much it may have."""

    name: str
    """Such as runs or volume_bytes; docs/operations.md lists them."""
    used: int
    limit: int
    """0 means that there is none."""

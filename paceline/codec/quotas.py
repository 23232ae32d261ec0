"""Encode and decode quotas."""

from __future__ import annotations

from paceline.types import Quota
from paceline.types.v1 import quota_pb2 as pb


def quota_to_proto(quota: Quota) -> pb.Quota:
    """Encode a quota."""
    return pb.Quota(name=quota.name, used=quota.used, limit=quota.limit)


def quota_from_proto(message: pb.Quota) -> Quota:
    """Decode a quota."""
    return Quota(message.name, message.used, message.limit)

"""Encode and decode timestamps."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp


def timestamp_to_proto(moment: datetime) -> Timestamp:
    """Encode a time."""
    message = Timestamp()
    message.FromDatetime(moment.astimezone(UTC))
    return message


def timestamp_from_proto(message: Timestamp) -> datetime:
    """Decode a time, in UTC."""
    return message.ToDatetime(UTC)

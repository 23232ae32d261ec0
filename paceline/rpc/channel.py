"""Channels: the options of every connection, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

MAX_MESSAGE_BYTES = 64 << 20
"""Replies hold log-probabilities of whole batches; requests are split well below this."""

_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A dead peer is noticed within 20 seconds even when no call is in progress (NAT and load balancers drop idle
    # connections silently). The answer to a ping is waited for as long as the longer of the two timeouts says, and
    # ping_timeout is a minute by default.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # After a restart of the peer the next attempt comes within a second, not after the default backoff of up to two
    # minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two clients in one process never share a connection by accident.
    ("grpc.use_local_subchannel_pool", 1),
)

_BULK_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A reader receives 2 MiB ahead. By default gRPC guesses how much a link holds and, on a fast one, receives many
    # chunks ahead of a reader that verifies them.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 << 20),
    # A chunk comes as one frame, not as 64.
    ("grpc.http2.max_frame_size", 2 << 20),
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a TLS connection."""

    ca: Path | None
    """Authorities that the server's certificate must come from; None means the system's."""
    cert: Path | None = None
    """Own certificate, for mTLS."""
    key: Path | None = None


def open_channel(
    target: str,
    tls: TlsFiles | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    *,
    bulk: bool = False,
) -> grpc.aio.Channel:
    """Open a channel in the running event loop.

    `target` is host:port or a gRPC name; None for `tls` means plaintext. `bulk` is for streams of large messages within
    a data center: little memory and few frames, but no more than 2 MiB in a link's round trip.
    """
    options = _CHANNEL_OPTIONS + _BULK_OPTIONS if bulk else _CHANNEL_OPTIONS
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()

"""Open channels. The comments give the reason for each option of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.files.secret_files import read_pem

MAX_MESSAGE_BYTES = 64 << 20
"""Sized for replies with the log-probabilities of whole batches; requests are split well below this."""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detect a dead peer within 20 seconds even if no call is in flight (NAT and load balancers drop idle connections
    # silently). gRPC waits for the reply to a ping for the longer of the two timeouts, and ping_timeout is a minute by
    # default.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect within a second after the peer restarts, instead of after the default backoff of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two clients in one process never share a connection by accident.
    ("grpc.use_local_subchannel_pool", 1),
)

BULK_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # Receive 2 MiB ahead of the reader. By default gRPC estimates how much data a link holds and, on a fast one,
    # receives many chunks ahead of a reader that verifies them.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 << 20),
    # Receive a chunk as one frame instead of 64.
    ("grpc.http2.max_frame_size", 2 << 20),
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a TLS connection."""

    ca: Path | None
    """CA certificates that the server's certificate must chain to; None means the system's."""
    cert: Path | None = None
    """The client's own certificate, for mTLS."""
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
    a data center: it uses little memory and few frames, but transfers at most 2 MiB per round trip. Raises ValueError
    for a file that is not PEM.
    """
    options = CHANNEL_OPTIONS + BULK_OPTIONS if bulk else CHANNEL_OPTIONS
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)


def _read(path: Path | None) -> bytes | None:
    return None if path is None else read_pem(path)

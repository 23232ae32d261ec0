"""Ports that nobody listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Find a port that is free on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def free_service_ports() -> int:
    """Find a port that is free, with the next two, and those 100 above for health, as `paceline up` takes them."""
    while True:
        base = free_port()
        wanted = [base + offset for offset in (0, 1, 2, 100, 101, 102)]
        if max(wanted) < 65536 and all(is_free(port) for port in wanted):
            return base


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of the loopback address."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0

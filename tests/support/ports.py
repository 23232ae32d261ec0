"""Free ports."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from tempfile import gettempdir

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The range of ports that the kernel assigns to connections; it starts at 32768 by default."""

_reserved: set[int] = set()
_locks = (Path(gettempdir()) / f"paceline-ports-{os.getuid()}").open("ab")
"""Byte n is locked by the process that reserved port n, until that process ends or closes any descriptor of this file.

It is shared by the processes of one user and one temporary directory.
"""


def free_port() -> int:
    """Reserve a port that is free on the loopback address and that the kernel assigns to no connection.

    A connection could take an assignable port before a service listens on it, or while the service is down. Even
    a client that polls the port could take it, because a socket can connect to its own port.
    """
    return _free_port(count=1)


def _free_port(count: int) -> int:
    """Reserve a port as `free_port` does, with the next `count` - 1 ports below the range that the kernel assigns."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    while True:
        port = SystemRandom().randrange(_FIRST, max(end, _FIRST + 1_000) + 1 - count)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if reserve(port):
                return port


def free_service_ports() -> int:
    """Reserve a port with the next three and the health ports 100 above, as `paceline up` needs them."""
    while True:
        base = _free_port(count=103)
        if all(is_free(base + offset) and reserve(base + offset) for offset in (1, 2, 3, 100, 101, 102)):
            return base


def reserve(port: int) -> bool:
    """Reserve a port for this process; return False if this or another one has it.

    Another could otherwise choose it before a service listens on it.
    """
    try:
        fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    if port in _reserved:
        return False
    _reserved.add(port)
    return True


def is_free(port: int) -> bool:
    """Whether nothing listens on a port of the loopback address."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0

"""The metrics port: scrapes are answered, and peers that say nothing hold it for a limited time."""

from __future__ import annotations

import socket
from urllib.request import urlopen

from prometheus_client import CollectorRegistry, Gauge
from support.patience import PATIENCE

from paceline.rpc import port_limits


def test_silent_peers_are_few_and_cut_off(monkeypatch):
    monkeypatch.setattr(port_limits, "SCRAPE_SECONDS", 0.5)
    registry = CollectorRegistry()
    Gauge("answer", "A number", registry=registry).set(42)
    server = port_limits.serve_metrics("127.0.0.1:0", registry)
    try:
        address = ("127.0.0.1", server.server_port)
        silent = [socket.create_connection(address, PATIENCE) for _ in range(64)]
        assert [peer.recv(1) for peer in silent] == [b""] * len(silent)
        for peer in silent:
            peer.close()
        assert b"answer 42.0" in urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=PATIENCE).read()
    finally:
        server.shutdown()
        server.server_close()

"""Pings of clients and servers fit each other: neither takes the other's for too many."""

from __future__ import annotations

from paceline.rpc.channel import _CHANNEL_OPTIONS
from paceline.rpc.server import _server_options
from paceline.settings import ServiceSettings


def test_clients_ping_less_often_than_servers_take():
    client, server = dict(_CHANNEL_OPTIONS), dict(_server_options(ServiceSettings()))
    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_recv_ping_interval_without_data_ms"]


def test_a_dead_gateway_is_noticed_within_20_seconds():
    client = dict(_CHANNEL_OPTIONS)
    for timeout in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert client["grpc.keepalive_time_ms"] + client[timeout] <= 20_000

"""`python -m paceline.services gateway`."""

from __future__ import annotations

import uvloop
from prometheus_client import CollectorRegistry

from gateway.service import GatewayService
from gateway.settings import GatewaySettings
from paceline.errors import InvalidArgument
from paceline.extras import MissingExtra
from paceline.rpc.server import serve
from paceline.settings import load_settings


def main() -> None:
    """Serve until SIGTERM."""
    settings = load_settings(GatewaySettings)
    registry = CollectorRegistry()
    try:
        service = GatewayService(settings, registry)
    except (InvalidArgument, MissingExtra) as error:
        raise SystemExit(str(error)) from error
    uvloop.run(serve(service, settings, registry))


if __name__ == "__main__":
    main()

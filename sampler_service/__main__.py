"""`python -m sampler_service`."""

from __future__ import annotations

import uvloop
from prometheus_client import CollectorRegistry

from paceline.rpc.server import serve
from paceline.settings import load_settings
from sampler_service.engine.factory import create_service_engine
from sampler_service.service import SamplerService
from sampler_service.settings import SamplerSettings


def main() -> None:
    """Serve until SIGTERM, or until the engine dies."""
    settings = load_settings(SamplerSettings)
    registry = CollectorRegistry()
    engine = create_service_engine(settings.engine, settings.bridge, settings.serves, settings.engine_options)
    uvloop.run(serve(SamplerService(settings, engine, registry), settings, registry))


# Engines start processes by spawn, which imports this module again.
if __name__ == "__main__":
    main()

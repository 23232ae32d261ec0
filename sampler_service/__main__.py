"""`python -m paceline.services sampler_service`."""

from __future__ import annotations

import uvloop
from prometheus_client import CollectorRegistry

from paceline.rpc.server import serve
from paceline.settings import load_settings
from sampler_service.engine.factory import create_service_engine
from sampler_service.engine.protocol import EngineUnfit
from sampler_service.service import SamplerService
from sampler_service.settings import SamplerSettings


def main() -> None:
    """Serve until SIGTERM, or until a dead engine cannot be restarted."""
    settings = load_settings(SamplerSettings)
    registry = CollectorRegistry()
    try:
        engine = create_service_engine(settings.mode, settings.engine_options)
        if settings.engine == "vllm":
            from sampler_service.engine.vllm.forks import start_fork_server  # noqa: PLC0415

            start_fork_server()
        uvloop.run(serve(SamplerService(settings, engine, registry), settings, registry))
    except EngineUnfit as unfit:
        raise SystemExit(str(unfit)) from None


# Engines spawn processes that import this module again.
if __name__ == "__main__":
    main()

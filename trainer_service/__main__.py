"""Run the trainer service: `python -m paceline.services trainer_service`."""

import asyncio

from prometheus_client import CollectorRegistry

from paceline.rpc.server import serve
from paceline.settings import load_settings
from trainer_service.service import TrainerService
from trainer_service.settings import TrainerSettings


def main() -> None:
    """Run the service until it is told to stop."""
    settings = load_settings(TrainerSettings)
    metrics = CollectorRegistry()
    asyncio.run(serve(TrainerService(settings, metrics), settings, metrics))


if __name__ == "__main__":
    main()

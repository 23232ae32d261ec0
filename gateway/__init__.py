"""The gateway: authentication, limits and routing. Re-exports the client of the API that it serves."""

from paceline import SamplingClient, ServiceClient, TrainingClient

__all__ = ["SamplingClient", "ServiceClient", "TrainingClient"]

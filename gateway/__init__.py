"""The gateway: who may call, how much, which service answers. Re-exports the client, the stub of what it serves."""

from paceline import SamplingClient, ServiceClient, TrainingClient

__all__ = ["SamplingClient", "ServiceClient", "TrainingClient"]

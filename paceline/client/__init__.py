"""The Python client of a Paceline gateway."""

from paceline.client.connection import RetryPolicy, Timeouts
from paceline.client.futures import PacelineFuture
from paceline.client.metrics import MetricsStream
from paceline.client.results import (
    Account,
    Acknowledgement,
    LogprobsResult,
    PublishResult,
    ServerCapabilities,
    SupportedModel,
)
from paceline.client.sampling_client import SampleStream, SamplingClient
from paceline.client.service_client import ServiceClient
from paceline.client.training_client import TrainingClient

__all__ = [
    "Account",
    "Acknowledgement",
    "LogprobsResult",
    "MetricsStream",
    "PacelineFuture",
    "PublishResult",
    "RetryPolicy",
    "SampleStream",
    "SamplingClient",
    "ServerCapabilities",
    "ServiceClient",
    "SupportedModel",
    "Timeouts",
    "TrainingClient",
]

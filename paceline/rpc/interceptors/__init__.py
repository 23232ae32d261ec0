"""The interceptors around every call, from the outside in: logging, metrics, errors, authentication."""

from paceline.rpc.interceptors.around import AroundInterceptor, Call, Chain
from paceline.rpc.interceptors.credential import CredentialInterceptor
from paceline.rpc.interceptors.errors import ErrorInterceptor
from paceline.rpc.interceptors.logging import LoggingInterceptor
from paceline.rpc.interceptors.metrics import MetricsInterceptor

__all__ = [
    "AroundInterceptor",
    "Call",
    "Chain",
    "CredentialInterceptor",
    "ErrorInterceptor",
    "LoggingInterceptor",
    "MetricsInterceptor",
]

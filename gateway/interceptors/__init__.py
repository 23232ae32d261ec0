"""The gateway's interceptors, inside logging, metrics and errors: authentication, then limits."""

from gateway.interceptors.auth import AuthInterceptor
from gateway.interceptors.limits import LimitsInterceptor

__all__ = ["AuthInterceptor", "LimitsInterceptor"]

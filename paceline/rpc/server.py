"""Run a service: open the health port, start the service, open its port, drain on SIGTERM, stop."""

from __future__ import annotations

import asyncio
import atexit
import errno
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server
from prometheus_client import CollectorRegistry

from paceline import tracing
from paceline.errors import PacelineError
from paceline.files.secret_files import read_pem
from paceline.log import configure_logging, get_logger
from paceline.rpc.interceptors import (
    AroundInterceptor,
    Chain,
    ErrorInterceptor,
    LoggingInterceptor,
    MetricsInterceptor,
    TracingInterceptor,
)
from paceline.rpc.port_limits import health_options, serve_metrics, service_options
from paceline.rpc.process_metrics import add_process_metrics
from paceline.settings import ServiceSettings

_log = get_logger(__name__)

_REMEDIES = {
    errno.EROFS: "mount it so that it can be written to",
    errno.EACCES: "let the service's user read and write it",
    errno.EPERM: "let the service's user read and write it",
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free part of the quota",
    errno.EEXIST: "a folder is needed: choose another path",
    errno.ENOTDIR: "a folder is needed: choose another path",
}
"""What to do about an error of a file or a folder that a service needs to start."""
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
_MOST_OPEN_FILES = 65_536
_MOST_DIGITS = sys.int_info.str_digits_check_threshold
"""Most digits of a number in a body: as few as Python allows."""

_REFLECTION: str = reflection.SERVICE_NAME
"""The v1alpha service, which also describes itself."""
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_REFLECTION_METHOD = "ServerReflectionInfo"
REFLECTION_METHODS = tuple(f"/{service}/{_REFLECTION_METHOD}" for service in (_REFLECTION, _REFLECTION_V1))


class Readiness:
    """Tells health probes whether the service can work. The empty service name stays SERVING: the process is alive."""

    def __init__(self, names: Sequence[str]) -> None:
        self.servicer = health_aio.HealthServicer()
        self.failure = ""
        """Why the service failed permanently; empty if it did not."""
        self.failed = asyncio.Event()
        self.obstacle = ""
        """Why the service is not ready even if it can work; empty if there is no obstacle."""
        self._can_work = False
        self.names = names

    def fail(self, reason: str) -> None:
        """Report that the service failed permanently: `serve` drains and exits with an error."""
        self.failure = reason
        self.failed.set()

    async def set(self, ready: bool) -> None:
        """Set whether the service can work."""
        self._can_work = ready
        await self._update()

    async def obstruct(self, obstacle: str) -> None:
        """Set why the service is not ready, whether or not it can work; an empty string clears it."""
        if obstacle:
            _log.error("not ready", reason=obstacle)
        self.obstacle = obstacle
        await self._update()

    async def _update(self) -> None:
        ready = self._can_work and not self.obstacle
        for name in self.names:
            await self.servicer.set(name, _SERVING if ready else _NOT_SERVING)


class Service(Protocol):
    """A service that `serve` runs."""

    name: str
    """Short name, for logs."""
    service_names: Sequence[str]
    """Full names of the gRPC services, for health and reflection."""

    def interceptors(self) -> Sequence[AroundInterceptor]:
        """Return the interceptors inside logging, metrics and errors: authentication, limits."""
        ...

    async def start(self, readiness: Readiness) -> None:
        """Do all work needed before the first call, such as loading a model."""
        ...

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service's handlers."""
        ...

    def drain(self) -> None:
        """End or keep the calls that wait for their turn; no further calls are accepted."""
        ...

    async def stop(self) -> None:
        """Stop the work that `start` started. Calls have drained by then."""
        ...


async def serve(service: Service, settings: ServiceSettings, registry: CollectorRegistry) -> None:
    """Run a service until SIGTERM or SIGINT. Raises SystemExit if the service fails.

    If it cannot start, the exit message is the error in one sentence.
    """
    # Services and their processes write training data, so modes are 0600 and 0700 whatever the shell's umask is.
    os.umask(0o077)
    # Converting a number takes time that grows with the square of its digits, during which no thread runs.
    sys.set_int_max_str_digits(_MOST_DIGITS)
    _allow_open_files()
    configure_logging(service.name, settings.log_level, settings.log_format)
    start_tracing(service.name, settings)
    # Otherwise the exiting interpreter looks for garbage in all that torch and vLLM imported, which takes seconds.
    atexit.register(gc.freeze)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    add_process_metrics(service.name, registry)
    if settings.metrics_listen:
        serve_metrics(settings.metrics_listen, registry)
    readiness = Readiness(service.service_names)
    health = await _start_health(readiness, settings.health_listen)
    await readiness.set(False)
    starting = asyncio.ensure_future(service.start(readiness))
    ends: set[asyncio.Future[Any]] = {asyncio.ensure_future(end.wait()) for end in (stopping, readiness.failed)}
    await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done():
            starting.result()
            server = make_server(service, settings, registry)
            await server.start()
            await readiness.set(True)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            service.drain()
            _log.info("draining", seconds=settings.drain_seconds)
            await readiness.set(False)
            await server.stop(settings.drain_seconds)
    except PacelineError as error:
        raise SystemExit(str(error)) from error  # The error's sentence is the last line that the process prints.
    except OSError as error:
        if error.filename is None:
            raise
        raise SystemExit(sentence_of(error)) from error
    finally:
        for task in (starting, *ends):
            task.cancel()
        await service.stop()
        await health.stop(None)
        await asyncio.to_thread(tracing.stop)  # it exports what is left, or waits for a collector that does not answer
        _log.info("stopped")
    if readiness.failure:
        _log.error("failed", reason=readiness.failure)
        raise SystemExit(1)


def start_tracing(name: str, settings: ServiceSettings) -> None:
    """Trace as the settings and OpenTelemetry's variables say. Raises SystemExit if that is not installed."""
    try:
        is_installed = tracing.start(name, settings.trace_endpoint, settings.trace_file)
    except PacelineError as error:
        raise SystemExit(str(error)) from error
    if not is_installed:
        _log.warning("not traced: OpenTelemetry is not installed", remedy="install paceline[otel]")


def sentence_of(error: OSError) -> str:
    """Say which file or folder cannot be used, why, and what to do."""
    return f"{error.filename}: {error.strerror}; {_REMEDIES.get(error.errno or 0, 'choose another path, or mend it')}"


def _allow_open_files() -> None:
    """Raise this process's limit of open files to what it may have.

    Many systems start processes with a limit of 1,024, which `max_connections` alone would use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def make_server(service: Service, settings: ServiceSettings, registry: CollectorRegistry) -> grpc.aio.Server:
    """Create the service's server, bound but not yet started."""
    services = [descriptor_pool.Default().FindServiceByName(name) for name in service.service_names]
    methods = {f"/{found.full_name}/{method.name}" for found in services for method in found.methods}
    server = grpc.aio.server(
        interceptors=[
            Chain(
                *([TracingInterceptor()] if tracing.is_on() else []),
                LoggingInterceptor(),
                MetricsInterceptor(registry, {*methods, *REFLECTION_METHODS}),
                ErrorInterceptor(),
                *service.interceptors(),
                reader_seconds=settings.reader_seconds,
            )
        ],
        options=service_options(settings),
    )
    service.register(server)
    if settings.reflection:
        _add_reflection(server, service.service_names)
    port = _bind(server, settings)
    _log.info("listening", address=settings.listen, port=port, tls=settings.tls_cert is not None)
    return server


def _add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve gRPC reflection as v1 and v1alpha: clients try v1 first, but the library serves only v1alpha.

    The two differ only in the package name, which is not part of a message.
    """
    servicer = ReflectionServicer([*services, _REFLECTION])
    add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {_REFLECTION_METHOD: handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_REFLECTION_V1, methods),))


def _bind(server: grpc.aio.Server, settings: ServiceSettings) -> int:
    if settings.tls_cert is None or settings.tls_key is None:
        return server.add_insecure_port(settings.listen)
    client_ca = read_pem(settings.tls_client_ca) if settings.tls_client_ca else None
    credentials = grpc.ssl_server_credentials(
        [(read_pem(settings.tls_key), read_pem(settings.tls_cert))], client_ca, client_ca is not None
    )
    return server.add_secure_port(settings.listen, credentials)


async def _start_health(readiness: Readiness, address: str) -> grpc.aio.Server:
    server = grpc.aio.server(options=health_options())
    add_HealthServicer_to_server(readiness.servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server

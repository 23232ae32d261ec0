"""Settings of a service: one class defines both its environment variables and its flags."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from paceline.files.secret_files import check_secret, read_pem, read_secret
from paceline.log import LogFormat
from paceline.rpc.channel import TlsFiles

CLIENT_VARIABLES = frozenset({"PACELINE_ADDRESS", "PACELINE_API_KEY", "PACELINE_TLS_CA"})
"""Read by the client; services ignore them."""

_AREAS = ("PACELINE_TRAINER_", "PACELINE_SAMPLER_", "PACELINE_GATEWAY_", "PACELINE_UP_")

_MAX_SHOWN = 100
"""Most characters of an invalid value that an error message shows."""
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})

S = TypeVar("S", bound="ServiceSettings")


def _check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address} is not an address; write host:port")
    return address


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


Address = Annotated[str, AfterValidator(_check_address)]
"""host:port; port 0 means any free port."""
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)]


class ServiceSettings(BaseSettings):
    """Settings of every service. Each field is an environment variable (prefix + name) and a flag (--name)."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="paceline-service",
        extra="forbid",
        # The docstring below a field is its description in `--help`.
        use_attribute_docstrings=True,
        # The value of a setting may be the credential.
        hide_input_in_errors=True,
    )

    listen: Address = "127.0.0.1:0"
    """Address of the service, host:port."""
    health_listen: Address = "127.0.0.1:0"
    """Address of grpc.health.v1: always plaintext and without a credential, for health probes."""
    metrics_listen: Literal[""] | Address = ""
    """Address of Prometheus metrics over HTTP; empty means none."""
    trace_endpoint: str = ""
    """OTLP endpoint (gRPC) of spans, as http://host:4317 or https://; requires the extra otel.

    Empty: that of OTEL_EXPORTER_OTLP_ENDPOINT, and no tracing without one.
    """
    trace_file: Path | None = None
    """File to which spans are appended as lines of JSON, for `paceline trace`; requires the extra otel."""
    reflection: bool = True
    """Serve gRPC reflection."""
    drain_seconds: float = Field(20.0, ge=0)
    """How long calls in progress may take to finish after SIGTERM."""
    max_message_bytes: int = Field(32 << 20, ge=1 << 20)
    """Largest message accepted."""
    max_connections: int = Field(1024, ge=1)
    """Most connections open at the same time; further ones are closed on arrival."""
    max_streams: int = Field(8192, ge=1)
    """Most calls in flight on one connection; clients hold further calls back until others end."""
    idle_seconds: float = Field(3600.0, gt=0)
    """How long a connection may be idle before it is closed; clients open another when they need it."""
    reader_seconds: float = Field(60.0, gt=0)
    """How long a message of a stream may wait for its reader before the call ends with READER_STALLED."""
    log_level: LogLevel = "INFO"
    """Log lines below this level are dropped."""
    log_format: LogFormat = "auto"
    """json, console, or auto: console on a terminal, JSON elsewhere."""
    tls_cert: Path | None = None
    """PEM certificate chain; set with tls_key to serve TLS."""
    tls_key: Path | None = None
    """PEM private key of tls_cert."""
    tls_client_ca: Path | None = None
    """PEM certificates of client authorities; if set, callers must present a certificate (mTLS)."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("set tls_cert and tls_key together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        _check_pems(self, "tls_cert", "tls_key", "tls_client_ca")
        return self


class PeerSettings(ServiceSettings):
    """Settings of a service that shares a credential with others."""

    credential: SecretStr | None = None
    """Secret shared by the gateway and the services. Its holder may act as any tenant."""
    credential_file: Path | None = None
    """File that holds the credential; safer than the variable, which other processes of the same user can read."""
    insecure: bool = False
    """Run without a credential: every caller that reaches the port is admitted as tenant "default"."""

    @model_validator(mode="after")
    def _check_credential(self) -> Self:
        if self.credential is None and (file := self.credential_file) is not None:
            self.credential = SecretStr(_credential(lambda: read_secret(file)))
        elif self.credential is not None:
            given = self.credential.get_secret_value()
            self.credential = SecretStr(_credential(lambda: check_secret(given)))
        if self.insecure == (self.credential is not None):
            raise ValueError("set credential or credential_file, or insecure to run without; not both")
        return self

    @property
    def secret(self) -> str:
        """The credential; empty when running insecurely."""
        return self.credential.get_secret_value() if self.credential else ""


class BackendSettings(PeerSettings):
    """Settings of a service that other services call directly, not through the gateway."""

    @model_validator(mode="after")
    def _check_insecure(self) -> Self:
        # Without a credential, any caller that reaches the port may act as any tenant and as a service.
        if self.insecure and self.listen.rpartition(":")[0] not in _LOOPBACK:
            raise ValueError(f"insecure requires a loopback listen address, not {self.listen}")
        return self


def _credential(get: Callable[[], str]) -> str:
    """Return the credential that `get` returns. Raises ValueError with what to do."""
    try:
        return get()
    except ValueError as error:
        raise ValueError(
            f"the credential {error}; make one with `python -c 'import secrets; print(secrets.token_hex(32))'`, "
            "or set insecure to run without"
        ) from error


def _check_pems(settings: object, *names: str) -> None:
    """Raise ValueError for a setting whose file is not PEM."""
    for name in names:
        if (path := getattr(settings, name)) is not None:
            try:
                read_pem(path)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error


class UpstreamTls(BaseModel):
    """How a service verifies the services that it calls."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    upstream_tls_ca: Path | None = None
    """PEM certificates of the authorities that issued the called services' certificates; if set, calls use TLS."""
    upstream_tls_cert: Path | None = None
    """PEM client certificate for mTLS."""
    upstream_tls_key: Path | None = None
    """PEM private key of upstream_tls_cert."""

    @model_validator(mode="after")
    def _check_upstream_tls(self) -> Self:
        if (self.upstream_tls_cert is None) != (self.upstream_tls_key is None):
            raise ValueError("set upstream_tls_cert and upstream_tls_key together")
        if self.upstream_tls_cert and not self.upstream_tls_ca:
            raise ValueError("upstream_tls_cert needs upstream_tls_ca; without it, calls are plaintext")
        _check_pems(self, "upstream_tls_ca", "upstream_tls_cert", "upstream_tls_key")
        return self

    @property
    def upstream_tls(self) -> TlsFiles | None:
        """The files, or None for plaintext."""
        if self.upstream_tls_ca is None:
            return None
        return TlsFiles(self.upstream_tls_ca, self.upstream_tls_cert, self.upstream_tls_key)


def load_settings(cls: type[S], arguments: Sequence[str] | None = None) -> S:
    """Read settings from the environment and the command line; exit with a message on an invalid or unknown one."""
    check_environment(cls, os.environ)
    with _sentences(cls):
        return CliApp.run(cls, cli_args=None if arguments is None else list(arguments))


def settings_of(cls: type[S], environment: Mapping[str, str]) -> S:
    """Read settings from another process's future environment; exit with a message on an invalid value."""
    prefix = str(cls.model_config.get("env_prefix", ""))
    values: dict[str, Any] = {
        name.removeprefix(prefix).lower(): text for name, text in environment.items() if name.startswith(prefix)
    }
    with _sentences(cls):
        return cls(**values)


@contextmanager
def _sentences(cls: type[ServiceSettings]) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise SystemExit("\n".join(_describe(cls, problem) for problem in error.errors())) from None


def _describe(cls: type[ServiceSettings], problem: ErrorDetails) -> str:
    """Describe a problem by the setting's variable and flag, and by its value unless that is secret."""
    message = problem["msg"].removeprefix("Value error, ")
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if name not in cls.model_fields:
        return f"{name}: {message}" if name else message
    names = f"{cls.model_config.get('env_prefix', '')}{name}".upper() + f" or --{name.replace('_', '-')}"
    if problem["type"] == "missing":
        return f"{names}: is not set"
    is_secret = SecretStr in get_args(cls.model_fields[name].annotation)
    given = "" if is_secret else f" is {str(problem['input'])[:_MAX_SHOWN]!r}"
    return f"{names}{given}: {message}"


def check_environment(cls: type[ServiceSettings], environment: Mapping[str, str]) -> None:
    """Reject misspelt variables, which pydantic-settings silently ignores."""
    prefix = str(cls.model_config.get("env_prefix", ""))
    known = {f"{prefix}{name}".upper() for name in cls.model_fields} | CLIENT_VARIABLES
    for name in sorted(environment):
        own = name.startswith(prefix) or (name.startswith("PACELINE_") and not name.startswith(_AREAS))
        if own and name not in known:
            # Compared without the common prefix, which would make all names similar.
            near = get_close_matches(name.removeprefix(prefix), [other.removeprefix(prefix) for other in known], n=1)
            raise SystemExit(
                f"unknown variable {name}; did you mean {prefix}{near[0]}?"
                if near
                else f"unknown variable {name}; known are: {', '.join(sorted(known - CLIENT_VARIABLES))}"
            )

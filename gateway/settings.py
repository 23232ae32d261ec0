"""Settings of the gateway: `PACELINE_GATEWAY_*` variables and flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from paceline.settings import Address, PeerSettings, UpstreamTls

_ORIGIN = re.compile(r"https?://[^\s/,*]+")


class GatewaySettings(PeerSettings, UpstreamTls):
    """Settings of the gateway."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_GATEWAY_", cli_prog_name="python -m paceline.services gateway"
    )

    listen: Address = "127.0.0.1:50050"
    """Address of the service, host:port."""
    health_listen: Address = "127.0.0.1:50150"
    """Address of grpc.health.v1: always plaintext and without a credential, for health probes."""
    max_streams: int = Field(1024, ge=1)
    """Most calls in flight on one connection; clients hold further calls back until others end."""
    idle_seconds: float = Field(600.0, gt=0)
    """How long a connection may be idle before it is closed; clients open another when they need it."""
    trainer: str = "127.0.0.1:50051"
    """Address of the trainer."""
    samplers: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.1:50052",)
    """Addresses of the samplers, comma-separated."""
    insecure: bool = False
    """Run without API keys or a credential: every caller that reaches the port is admitted as tenant "default"."""
    keys_file: Path | None = None
    """JSON file of API keys, made by `paceline keys add`; changes take effect without a restart."""
    tenants_file: Path | None = None
    """JSON file of limits of single tenants, made by `paceline keys quota`; changes take effect without a restart."""
    jwt_public_key_file: Path | None = None
    """PEM public key; if set, a JSON Web Token signed with it is accepted in place of an API key."""
    jwt_algorithm: Literal["RS256", "ES256", "EdDSA"] = "RS256"
    """The only signature algorithm that is accepted."""
    jwt_tenant_claim: str = "tenant"
    """Claim that names the tenant."""
    jwt_audience: str = ""
    """Required value of the `aud` claim; empty means that tokens must not have the claim."""
    max_in_flight: int = Field(4096, ge=1)
    """Most calls forwarded at the same time; further calls wait, and tenants take turns."""
    max_in_flight_per_tenant: int = Field(1024, ge=1)
    """Most calls of one tenant forwarded at the same time; further calls wait."""
    max_queued_per_tenant: int = Field(8192, ge=0)
    """Most waiting calls of one tenant; further calls are refused with OVERLOADED."""
    max_bytes_in_flight: int = Field(4 << 30, ge=0)
    """Most bytes of calls forwarded at the same time; further calls are refused with OVERLOADED. 0 means no limit."""
    max_bytes_in_flight_per_tenant: int = Field(1 << 30, ge=0)
    """Most bytes of one tenant's calls forwarded at the same time; further calls are refused with QUOTA_EXCEEDED.

    0 means no limit. Keep it above the trainer's max_waiting_bytes_per_tenant: the trainer knows what a run needs to
    continue.
    """
    http_listen: Literal[""] | Address = ""
    """Address of the HTTP APIs (Tinker's and others'); empty means none. It uses TLS if the service does."""
    http_max_connections: int = Field(8192, ge=1)
    """Most HTTP connections open at the same time; further ones are closed on arrival.

    Each request that waits for a result occupies one.
    """
    http_max_requests_per_tenant: int | None = Field(None, ge=1)
    """Most unanswered HTTP requests of one tenant; further ones are refused with OVERLOADED.

    Unset means half of http_max_connections.
    """
    http_state: Path = Path(".paceline/http")
    """Directory of the HTTP APIs' persistent state: sessions, names, unfetched results, examples."""
    http_public_url: str = Field("", pattern=r"^(https?://[^\s/]+\S*)?$")
    """URL at which clients reach the HTTP APIs through a proxy, as https://host:port.

    Download URLs begin with it; if empty, with the URL that the client called.
    """
    http_aliases: Annotated[tuple[str, ...], NoDecode] = ()
    """Additional names of the base model for HTTP clients, comma-separated."""
    http_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins of web pages that may call the HTTP APIs (CORS), comma-separated, as https://host:port; * means all.

    Empty: no page may, and preflight requests need a key like any other.
    """
    http_tokenizer: str = ""
    """Directory or Hugging Face id from which Tinker's SDK loads the tokenizer; empty means the model's name."""
    spill_in_flight: int = Field(16, ge=0)
    """Extra calls in flight that a sampler holding the version gets before another must load the version."""
    info_timeout_seconds: float = Field(5.0, gt=0)
    """How long GetCapabilities and WhoAmI wait for each service."""

    @field_validator("samplers", "http_aliases", "http_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(part.strip() for part in parts if part.strip()) if isinstance(parts, list | tuple) else parts

    @field_validator("http_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; give it as https://host or https://host:port, without a path"
                )
        return value

    @field_validator("samplers")
    @classmethod
    def _check_samplers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(value) or len(set(value)) != len(value):
            raise ValueError("name each sampler once, as host:port, separated by commas")
        return value

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.insecure == (self.keys_file is not None or self.jwt_public_key_file is not None):
            raise ValueError(
                "set keys_file (make one with `paceline keys add`) or jwt_public_key_file, "
                "or insecure to admit every caller; not both"
            )
        return self

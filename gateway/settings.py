"""Settings of the gateway: `PACELINE_GATEWAY_*` and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from paceline.settings import Address, PeerSettings, UpstreamTls


class GatewaySettings(PeerSettings, UpstreamTls):
    """What the gateway can be told."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_GATEWAY_", cli_prog_name="python -m gateway")

    listen: Address = "127.0.0.1:50050"
    """Address of the service, host:port."""
    health_listen: Address = "127.0.0.1:50150"
    """Address of grpc.health.v1, always plaintext and without a credential, as probes need it."""
    max_streams: int = Field(1024, ge=1)
    """Calls that one connection carries at the same time; a client holds more back until others end."""
    idle_seconds: float = Field(600.0, gt=0)
    """How long a connection may be without a call before it is closed; clients open another when they need it."""
    trainer: str = "127.0.0.1:50051"
    """Address of the trainer."""
    samplers: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.1:50052",)
    """Addresses of the samplers, separated by commas."""
    insecure: bool = False
    """Run without API keys and without a credential: whoever reaches the port is tenant "default"."""
    keys_file: Path | None = None
    """JSON file of API keys, made by `python -m gateway.keys add`; changes are seen without a restart."""
    jwt_public_key_file: Path | None = None
    """PEM public key; set, a JSON Web Token signed with it is taken in place of an API key."""
    jwt_algorithm: Literal["RS256", "ES256", "EdDSA"] = "RS256"
    """The one signature algorithm that is taken."""
    jwt_tenant_claim: str = "tenant"
    """Claim that names the tenant."""
    jwt_audience: str = ""
    """Value that the `aud` claim must hold; empty means that tokens must have none."""
    max_in_flight: int = Field(4096, ge=1)
    """Calls that are passed on at the same time; more wait, and tenants take turns."""
    max_in_flight_per_tenant: int = Field(1024, ge=1)
    """Calls of one tenant that are passed on at the same time; more wait."""
    max_queued_per_tenant: int = Field(8192, ge=0)
    """Calls of one tenant that wait; more are refused with OVERLOADED."""
    max_bytes_in_flight: int = Field(4 << 30, ge=0)
    """Bytes of calls that are passed on at the same time; more are refused with OVERLOADED. 0 means no limit."""
    max_bytes_in_flight_per_tenant: int = Field(1 << 30, ge=0)
    """Bytes of one tenant's calls that are passed on at the same time; more are refused. 0 means no limit.

    Leave it above the trainer's max_waiting_bytes_per_tenant, which knows what a run needs to go on.
    """
    http_listen: Literal[""] | Address = ""
    """Address of the HTTP APIs (Tinker's and others'); empty means none. It speaks TLS where the service does."""
    http_max_connections: int = Field(8192, ge=1)
    """HTTP connections that are open at the same time; each request that waits for a result takes one."""
    http_state: Path = Path(".paceline/http")
    """Directory of what the HTTP APIs keep across restarts: sessions, names, unfetched results, examples."""
    http_public_url: str = Field("", pattern=r"^(https?://[^\s/]+\S*)?$")
    """Address by which clients reach the HTTP APIs, as https://host:port, where a proxy stands before them.

    Addresses for downloads begin with it; empty: with what the client called.
    """
    http_aliases: Annotated[tuple[str, ...], NoDecode] = ()
    """Names under which HTTP clients know the base model too, separated by commas."""
    http_tokenizer: str = ""
    """Directory or Hugging Face id that Tinker's SDK loads the tokenizer from; empty: from the model's name."""
    spill_in_flight: int = Field(16, ge=0)
    """How many more calls than another a sampler that holds the version gets before the other one must load it."""
    info_timeout_seconds: float = Field(5.0, gt=0)
    """How long GetCapabilities waits for each service."""

    @field_validator("samplers", "http_aliases", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(part.strip() for part in parts if part.strip()) if isinstance(parts, list | tuple) else parts

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
                "set keys_file (make one with `python -m gateway.keys add`) or jwt_public_key_file, "
                "or insecure to let everybody in; not both"
            )
        return self

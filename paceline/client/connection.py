"""A client's connection settings, from arguments and the environment: address, key, TLS, timeouts, retries."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.files.secret_files import read_pem
from paceline.rpc.channel import TlsFiles

DEFAULT_PORT = 50050
DEFAULT_ADDRESS = f"localhost:{DEFAULT_PORT}"
SYSTEM_AUTHORITIES = "system"
ADDRESS_VARIABLE, KEY_VARIABLE, CA_VARIABLE = "PACELINE_ADDRESS", "PACELINE_API_KEY", "PACELINE_TLS_CA"

MAX_SECONDS = 10 * 365 * 86400.0
"""Ten years. gRPC cannot hold much longer deadlines."""

_WITHOUT_PORT = re.compile(r"[^:/]*:?|\[[^]]*\]:?|[0-9a-fA-F:]*::[0-9a-fA-F:]*")
"""A name or an IPv4 address alone, an IPv6 address in brackets alone, or one without brackets."""

_PORT = re.compile(r"(?:[^:/]+|\[[^]]*\]|(?:dns|ipv[46]):.*):([0-9]+)")
"""A host:port with a number as port, which gRPC takes modulo 65536."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds: of one attempt, by kind of call, and of connecting and closing.

    At most 10 years; above 0, but `close` may be 0. Raises InvalidArgument, NonFinite or OutOfRange, naming the field.
    """

    training: float = 600.0
    """Commands of a run, creating or deleting a run, rendering conversations, and moving a checkpoint up or down.

    The time of a command begins again whenever a command of its run before it is answered.
    """
    sampling: float = 300.0
    """Samples, streams and log-probabilities."""
    query: float = 30.0
    """Everything else."""
    connect: float = 5.0
    """The first connection. A lost connection is re-established within RetryPolicy.budget."""
    close: float = 300.0
    """Unanswered commands, when the client is closed or the process ends. The log names what is being waited for."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = checked_seconds(getattr(self, each.name), each.name, allow_zero=each.name == "close")
            object.__setattr__(self, each.name, value)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to retry a call that the service could not accept.

    The wait before attempt n + 1 is the delay requested by the service plus a random one, uniform between 0 and
    min(max_delay, first_delay * 2^(n - 1)) ("full jitter": clients that failed together do not retry together).

    Each field is between 0 and 10 years. Raises InvalidArgument, NonFinite or OutOfRange, naming the field.
    """

    budget: float = 300.0
    """Seconds after the first failure until a call is given up; 0 disables retries."""
    first_delay: float = 0.1
    """In seconds."""
    max_delay: float = 10.0
    """In seconds."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, checked_seconds(getattr(self, each.name), each.name))


@dataclass(frozen=True, slots=True)
class Connection:
    """Connection settings. A pickle of them holds no key: the other process reads its own environment variable."""

    address: str
    api_key: str = field(repr=False)
    key_source: str
    """Source of the key, the variable or the argument; empty if there is no key."""
    tls: TlsFiles | None
    timeouts: Timeouts
    retry: RetryPolicy
    max_in_flight: int

    def refused_key(self, refusal: errors.InvalidApiKey) -> errors.InvalidApiKey:
        """Return the error for a key that the gateway refused; only of one that expired it knows more than we do."""
        if isinstance(refusal, errors.ApiKeyExpired):
            return refusal
        give = f"set {KEY_VARIABLE}, or give ServiceClient(api_key=...)"
        if not self.api_key:
            return errors.InvalidApiKey(f"{self.address} requires an API key; {give}", field=KEY_VARIABLE)
        message = f"is not a valid API key of {self.address}; {give}"
        return errors.InvalidApiKey(message, field=self.key_source)

    def __reduce__(self) -> tuple[Callable[..., Connection], tuple[Any, ...]]:
        if self.key_source == "api_key":
            message = f"was given as an argument, which a pickle must not contain; set {KEY_VARIABLE} in both processes"
            raise errors.InvalidArgument(message, field="api_key")
        return _restore, (self.address, self.tls, self.timeouts, self.retry, self.max_in_flight)


def make_connection(
    address: str | None,
    api_key: str | None,
    tls: TlsFiles | None,
    timeouts: Timeouts | None,
    retry: RetryPolicy | None,
    max_in_flight: int,
) -> Connection:
    """Fill in missing arguments from the environment. Raises InvalidArgument, naming the argument or the variable."""
    key, source = _find_key(api_key)
    if not isinstance(timeouts, Timeouts | None):
        raise errors.InvalidArgument.of_type(timeouts, "Timeouts(...), or None for the defaults", "timeouts")
    if not isinstance(retry, RetryPolicy | None):
        raise errors.InvalidArgument.of_type(retry, "RetryPolicy(...), or None for the defaults", "retry")
    limit = _checked_limit(max_in_flight)
    return Connection(_find_address(address), key, source, tls, timeouts or Timeouts(), retry or RetryPolicy(), limit)


def checked_seconds(value: object, field_name: str, *, allow_zero: bool = True, maximum: float = MAX_SECONDS) -> float:
    """Return a number of seconds as a float. Raises InvalidArgument, NonFinite or OutOfRange, naming the field."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise errors.InvalidArgument.of_type(value, "a number of seconds", field_name)
    least = "0 or more" if allow_zero else "more than 0"
    remedy = f"give {least}, and at most {maximum:.0f} seconds ({_in_words(maximum)})"
    try:
        seconds = float(value)
    except OverflowError:
        raise errors.OutOfRange(f"is too large; {remedy}", field=field_name) from None
    if not math.isfinite(seconds):
        raise errors.NonFinite(f"is {seconds}; {remedy}", field=field_name)
    if not 0 <= seconds <= maximum or (seconds == 0 and not allow_zero):
        raise errors.OutOfRange(f"is {seconds:g}; {remedy}", field=field_name)
    return seconds


def make_tls(ca: str | Path | None, cert: str | Path | None, key: str | Path | None) -> TlsFiles | None:
    """Return the files of a TLS connection; None for plaintext. Raises InvalidArgument for an unreadable file."""
    source = CA_VARIABLE if ca is None else "tls_ca"
    authorities = os.environ.get(CA_VARIABLE) if ca is None else str(ca)
    if authorities is not None and not authorities.strip():
        raise errors.InvalidArgument("is empty; give the authorities' file, or unset it for plaintext", field=source)
    if authorities is None:
        if cert or key:
            raise errors.InvalidArgument("needs tls_ca: the authorities of the gateway's certificate", field="tls_cert")
        return None
    return TlsFiles(
        None if authorities == SYSTEM_AUTHORITIES else _readable(authorities, source),
        _readable(cert, "tls_cert") if cert else None,
        _readable(key, "tls_key") if key else None,
    )


def _in_words(seconds: float) -> str:
    days = seconds / 86400
    return f"{days / 365:g} years" if days >= 365 else f"{days * 24:g} hours"


def _checked_limit(value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise errors.InvalidArgument.of_type(value, "an integer", "max_in_flight")
    if value < 1:
        raise errors.OutOfRange(f"is {value}; give 1 or more", field="max_in_flight")
    return int(value)


def _find_address(given: str | None) -> str:
    if not isinstance(given, str | None):
        raise errors.InvalidArgument.of_type(given, "host:port", "address")
    source = "address" if given else ADDRESS_VARIABLE
    address = (given or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS).strip()
    if "://" in address and address.partition("://")[0] in {"http", "https", "grpc", "grpcs"}:
        raise errors.InvalidArgument(f"is {address}; leave the {address.partition('//')[0]}// out", field=source)
    if _WITHOUT_PORT.fullmatch(address):
        message = f"is {address}, without a port; give host:port. A gateway's gRPC port is {DEFAULT_PORT} by default"
        raise errors.InvalidArgument(message, field=source)
    port = _PORT.fullmatch(address)
    if port and not 1 <= int(port[1]) <= 65535:
        raise errors.InvalidArgument(f"is {address}; give a port from 1 to 65535", field=source)
    return address


def _find_key(given: str | None) -> tuple[str, str]:
    if not isinstance(given, str | None):
        raise errors.InvalidArgument.of_type(given, "the key, a string", "api_key")
    key, source = (os.environ.get(KEY_VARIABLE), KEY_VARIABLE) if given is None else (given, "api_key")
    if key is None:
        return "", ""
    key = key.strip()
    if not key:
        remedy = f"give a key, or unset {KEY_VARIABLE} for a gateway that requires none"
        raise errors.InvalidArgument(f"is empty; {remedy}", field=source)
    if not all(" " <= character <= "~" for character in key):
        message = "contains a line break or another character that API keys never have; give the key alone, on one line"
        raise errors.InvalidArgument(message, field=source)
    return key, source


def _readable(path: str | Path, field_name: str) -> Path:
    try:
        read_pem(Path(path))
    except ValueError as problem:
        raise errors.InvalidArgument(str(problem), field=field_name) from problem
    return Path(path)


def _restore(*settings: Any) -> Connection:
    address, tls, timeouts, retry, max_in_flight = settings
    return make_connection(address, None, tls, timeouts, retry, max_in_flight)

"""Assemble Tinker's API, with a refusal for each call of the hosted service that does not apply here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from fastapi import APIRouter

from gateway.admission import Authenticator
from gateway.http.models import Models
from gateway.http.services import Services
from gateway.http.state import in_state
from gateway.http.tinker.api import DataPlane
from gateway.http.tinker.catalog import Catalog
from gateway.http.tinker.downloads import Downloads, read_or_make_secret
from gateway.http.tinker.futures import Futures
from gateway.http.tinker.names import Aliases, Names
from gateway.http.tinker.retirement import Retirement
from gateway.http.tinker.sampling import Sampling
from gateway.http.tinker.sessions import Sessions
from gateway.http.tinker.store import Store
from gateway.http.tinker.tidying import Tidying
from gateway.http.tinker.training import Training
from gateway.settings import GatewaySettings
from paceline import errors
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.steady_clock import SteadyClock

PREFIX = "/api/v1"
_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{folder}/{name}"
_UNSERVED = {
    ("POST", "/auth/token"): "API keys are used as they are",
    ("GET", "/auth/apikey/me"): "`paceline keys` adds and removes keys",
    ("DELETE", "/auth/apikey/me"): "`paceline keys` adds and removes keys",
    ("POST", _CHECKPOINT + "/publish"): "a checkpoint belongs to its tenant; download it and pass on the files",
    ("DELETE", _CHECKPOINT + "/publish"): "a checkpoint belongs to its tenant",
    ("POST", "/copy_weights"): "load the checkpoint into a new training client",
    ("POST", "/create_custom_loss"): "forward_backward_custom runs a loss in the client",
    ("PUT", "/sessions/{session_id}/project"): "there are no projects, only tenants",
    ("GET", "/sessions/{session_id}/trace_export"): "the services export traces and metrics themselves",
    ("POST", "/sessions/search"): "list the sessions",
    ("GET", "/audit"): "the gateway logs every call",
    ("GET", "/billing/usage/events"): "nothing is billed",
    ("POST", "/billing/usage/events"): "nothing is billed",
    ("GET", "/billing/usage/checkpoints/current"): "nothing is billed; list the checkpoints for their sizes",
    ("POST", "/billing/usage/checkpoints/current"): "nothing is billed; list the checkpoints for their sizes",
}
"""What to do instead of a refused call."""


class TinkerApi:
    """The routes, and the background work behind them."""

    def __init__(
        self,
        services: Services,
        waiting_bytes: WaitingBytes,
        settings: GatewaySettings,
        authenticators: Sequence[Authenticator] = (),
    ) -> None:
        """Open the files in `http_state`. Raises StateUnusable or InvalidArgument if one cannot be used.

        Download URLs hold as long as one of the authenticators admits the key that asked for them.
        """
        state, max_bytes = settings.http_state, settings.max_message_bytes
        # The database last: it would be left open if another file cannot be had.
        seeds, signing = (read_or_make_secret(state / f"{name}.secret") for name in ("seeds", "downloads"))
        clock, clock_file = SteadyClock(), state / "clock.json"
        with in_state(clock_file):
            # A client cannot be heard while the gateway is away, so that time is not counted.
            clock.resume(clock_file, counts_downtime=False)
        self.store = Store(state / "tinker.sqlite")
        self._futures = Futures(self.store, waiting_bytes, clock)
        self._sessions = Sessions(self.store, self._futures, clock)
        names, aliases = Names(self.store), Aliases(settings.http_aliases)
        # Posted work counts its bytes until it is done. Its calls count none, or it would wait for itself.
        sending = replace(services, waiting_bytes=WaitingBytes())
        self._retirement = Retirement(sending, self.store)
        self._sessions.on_over = self._retirement.wake
        self.models = Models(services, names, aliases)
        """Resolves names, Tinker's among them, for the other APIs too."""
        self._tidying = Tidying(self.models, self.store)
        self._training = training = Training(
            sending, self.store, names, aliases, self._retirement, self._tidying, self._futures, max_bytes
        )
        most_samples = max(settings.max_in_flight_per_tenant // 2, 1)
        sampling = Sampling(sending, self.store, aliases, self._futures, seeds, most_samples)
        self.downloads = downloads = Downloads(services, signing, settings.http_public_url, authenticators)
        data_plane = DataPlane(
            self.store,
            self._sessions,
            self._futures,
            training,
            sampling,
            names,
            aliases,
            self.models,
            downloads,
            max_body_bytes=max_bytes,
            tokenizer=settings.http_tokenizer,
        )
        catalog = Catalog(services, self.store, names, self.models, self._sessions, downloads)
        self.routes = APIRouter(prefix=PREFIX, tags=["tinker"])
        for routes in (data_plane.routes(), catalog.routes(), downloads.routes()):
            self.routes.include_router(routes)
        for (method, path), instead in _UNSERVED.items():
            self.routes.add_api_route(path, _refusal(instead), methods=[method], name=f"{method} {path}")
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Restart the work that an earlier gateway left unfinished."""
        await self._futures.resume()
        await self._sessions.resume()
        self._retirement.wake()
        self._sweeping = asyncio.create_task(self._sessions.sweep())

    async def stop(self) -> None:
        """Stop the work in progress; the next gateway restarts it."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._futures.close()
        await self._training.close()
        await self._retirement.close()
        await self._tidying.close()
        self.store.close()


def _refusal(instead: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise errors.Unsupported(f"not served here: {instead}")

    return refuse

"""Calls of the hosted service that do not apply here. Each is refused with a message that names the alternative."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from paceline import errors

_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{folder}/{name}"
_WHY = {
    ("POST", "/auth/token"): "API keys are used as they are",
    ("GET", "/auth/apikey/me"): "`python -m gateway.keys` makes and removes keys",
    ("DELETE", "/auth/apikey/me"): "`python -m gateway.keys` makes and removes keys",
    ("POST", _CHECKPOINT + "/publish"): "a checkpoint is its tenant's; download it, and hand on the files",
    ("DELETE", _CHECKPOINT + "/publish"): "a checkpoint is its tenant's",
    ("POST", "/copy_weights"): "load the checkpoint into a new training client",
    ("POST", "/create_custom_loss"): "forward_backward_custom runs a loss in the client",
    ("PUT", "/sessions/{session_id}/project"): "there are no projects; a tenant is who has a key",
    ("GET", "/sessions/{session_id}/trace_export"): "the services export traces and metrics themselves",
    ("POST", "/sessions/search"): "list the sessions",
    ("GET", "/audit"): "the gateway's log has every call",
    ("GET", "/billing/usage/events"): "nothing is billed",
    ("POST", "/billing/usage/events"): "nothing is billed",
    ("GET", "/billing/usage/checkpoints/current"): "nothing is billed; list the checkpoints for their sizes",
    ("POST", "/billing/usage/checkpoints/current"): "nothing is billed; list the checkpoints for their sizes",
}


def unserved() -> APIRouter:
    """Return the routes below /api/v1."""
    router = APIRouter()
    for (method, path), instead in _WHY.items():
        router.add_api_route(path, _refusal(instead), methods=[method], name=f"{method} {path}")
    return router


def _refusal(instead: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise errors.Unsupported(f"not served here: {instead}")

    return refuse

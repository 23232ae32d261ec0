"""The HTTP APIs on one opened state: one application, and the work behind it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from gateway.admission import Authenticator
from gateway.deployment import Deployment
from gateway.http.generate import GenerateApi
from gateway.http.metaclaw.api import MetaClawApi
from gateway.http.online.api import OnlineApi
from gateway.http.openai import OpenAiApi
from gateway.http.openai_errors import UnknownUrl, WrongMethod
from gateway.http.page.api import PageApi
from gateway.http.page.files import page_files
from gateway.http.problems import problem
from gateway.http.services import Services
from gateway.http.state import StateUnusable, lock_state
from gateway.http.tinker.app import TinkerApi
from gateway.settings import GatewaySettings
from paceline import errors
from paceline.log import get_logger
from paceline.requests.waiting_bytes import WaitingBytes

_log = get_logger(__name__)


class HttpApis:
    """The APIs, and the lock on their state."""

    def __init__(
        self,
        settings: GatewaySettings,
        authenticators: Sequence[Authenticator],
        services: Services,
        deployment: Deployment,
        waiting_bytes: WaitingBytes,
    ) -> None:
        """Lock and open the state. Raises StateUnusable, or InvalidArgument for a file of another format."""
        with ExitStack() as undo:
            self._lock = lock_state(settings.http_state, f"with gRPC at {settings.listen}")
            undo.callback(self._lock.close)
            self._tinker = TinkerApi(services, waiting_bytes, settings, authenticators)
            undo.callback(self._tinker.store.close)
            models = self._tinker.models
            metaclaw = MetaClawApi(services, models, settings.http_state)
            undo.callback(metaclaw.store.close)
            self._online = OnlineApi(services, models, settings.http_state, settings.max_message_bytes)
            undo.pop_all()
        self._stores = (self._tinker.store, self._online.store, metaclaw.store)
        self._metaclaw = metaclaw
        self.identify = self._tinker.downloads.identify
        """Returns the caller that a download URL is for, or raises the refusal."""
        openai = OpenAiApi(services, models, metaclaw.chat_without_model)
        self.app = make_app(
            self._tinker.routes,
            openai.routes(),
            openai.calls("/v1"),
            openai.calls("/weights/{weights}/v1"),
            GenerateApi(models, openai).routes(),
            metaclaw.routes(),
            self._online.routes(),
            PageApi(services, models, deployment).routes(),
            page_files(),
        )

    @property
    def trouble(self) -> StateUnusable | None:
        """Why the state could not be read, or last not be written; damage first. None if it could."""
        found = [store.trouble for store in self._stores if store.trouble is not None]
        return next((trouble for trouble in found if trouble.is_damage), found[0] if found else None)

    async def start(self) -> None:
        """Resume the work that an earlier gateway left unfinished."""
        await self._tinker.start()
        await self._online.start()

    async def stop(self) -> None:
        """Stop the work in progress, and let another gateway have the state."""
        try:
            await self._tinker.stop()
            await self._online.stop()
            self._metaclaw.store.close()
        finally:
            self._lock.close()


def make_app(*apis: APIRouter) -> FastAPI:
    """Return the application. Every error becomes a JSON response."""
    app = FastAPI(title="Paceline", openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/health")
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    for routes in apis:
        app.include_router(routes)

    @app.exception_handler(errors.PacelineError)
    async def paceline_error(request: Request, error: errors.PacelineError) -> Response:
        return problem(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = () if first["type"] == "json_invalid" else first["loc"]  # else it is the number of a character
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part != "body"]
        refusal = errors.InvalidArgument(str(first["msg"]), field="".join(parts).removeprefix("."))
        return problem(refusal, request.url.path)

    @app.exception_handler(Exception)
    async def uncaught(request: Request, error: Exception) -> Response:
        unforeseen = errors.Internal.unforeseen()
        _log.error("uncaught", path=request.url.path[:96], error_id=unforeseen.error_id, exc_info=error)
        return problem(unforeseen, request.url.path)

    @app.exception_handler(UnicodeEncodeError)
    async def invalid_text(request: Request, error: UnicodeEncodeError) -> Response:
        refusal = errors.UnreadableMessage("the request has text that is not Unicode: half of a surrogate pair")
        return problem(refusal, request.url.path)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        refusal: errors.PacelineError
        if isinstance(error.__cause__, errors.PacelineError):  # FastAPI takes what refused a body for a parser's error
            return problem(error.__cause__, request.url.path)
        if error.status_code == HTTPStatus.NOT_FOUND:
            refusal = UnknownUrl("no such path; docs/compatibility.md lists what is served")
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "another")
            refusal = WrongMethod(f"is called with {allowed}, not {request.method[:16]}")
        elif error.status_code == HTTPStatus.BAD_REQUEST:  # FastAPI could not decode a body as text
            refusal = errors.UnreadableMessage("the body is not JSON in UTF-8")
        else:
            refusal = errors.Unsupported(str(error.detail))
        answer = problem(refusal, request.url.path, error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    return app

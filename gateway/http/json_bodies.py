"""Bodies in JSON: parsed and validated away from the event loop, up to the first thing that is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, cast

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, FailFast, StrictInt, ValidationError
from starlette.types import Receive, Scope
from typing_extensions import TypeAliasType

from paceline import errors
from paceline.requests.bodies import decoded

_AT = re.compile(r" - at `\$\.?(.*)`$")
_NAME = re.compile(r"(?:unknown|required) field `(.*?)`")
_MAX_NAMES = 256
"""Most names in an object whose unknown names are refused one by one."""
T = TypeVar("T")
# Lists that are validated up to their first wrong element. Aliases, since pydantic's unions take nothing else.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Integers = TypeAliasType("Integers", Annotated[list[StrictInt], FailFast()])
Objects = TypeAliasType("Objects", Annotated[list[dict[str, Any]], FailFast()])


class JsonRoute(APIRoute):
    """A route whose handler may take a model of pydantic as its body.

    FastAPI alone would parse the body on the event loop.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = cast("type[BaseModel]", self.body_field.field_info.annotation)

        async def read(request: Request) -> Response:
            if content := await request.body():
                body = await decoded(len(content), _validated, content, model)
                request = _ReadRequest(request.scope, request.receive, content, body)
            return await handle(request)

        return read


class _ReadRequest(Request):
    """A request whose body was read and validated."""

    def __init__(self, scope: Scope, receive: Receive, content: bytes, body: Any) -> None:
        super().__init__(scope, receive)
        self._body = content
        self._validated = body

    async def json(self) -> Any:
        """Return what the body was read as."""
        return self._validated


def _validated(content: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse and validate a body. Raises UnreadableMessage, RequestValidationError."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise errors.UnreadableMessage("the body is not JSON in UTF-8") from error
    try:
        return model.model_validate(body)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
        raise RequestValidationError([first]) from None


def without_nulls(body: Any) -> Any:
    """Return a JSON object without the fields that are null, which means in every API that they are not set.

    Raises ValueError for more names than any request has.
    """
    if not isinstance(body, dict):
        return body
    if len(body) > _MAX_NAMES:
        raise ValueError(f"has {len(body)} fields; at most {_MAX_NAMES} are accepted")
    return {name: value for name, value in body.items() if value is not None}


def read_struct(
    content: bytes,
    kind: type[T],
    page: str,
    place: str = "",
    wanted: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Parse JSON, and validate it meanwhile, so that a large invalid body costs little.

    `place` is its position in the body, `page` the page that lists the fields, and `wanted` says what fields must be.
    Raises UnreadableMessage, UnknownField, InvalidArgument.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as problem:
        text = str(problem)
        inside = found[1] if (found := _AT.search(text)) else ""
        name = named[1] if (named := _NAME.search(text)) else ""
        field = ".".join(filter(None, (place, inside, name))).replace(".[", "[")
        if "unknown field" in text:
            raise errors.UnknownField(f"is not known; see {page}", field=field) from problem
        raise errors.InvalidArgument(wanted.get(field) or _AT.sub("", text), field=field) from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as problem:
        raise errors.UnreadableMessage(f"the body is not JSON: {problem}"[:200]) from problem

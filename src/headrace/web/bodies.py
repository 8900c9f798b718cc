"""Bodies, queries and answers of our own endpoints, which refuse fields they do not know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.config.http import HttpConfig
from headrace.errors import InvalidRequest
from headrace.web.exchange import headers_of, read_json

T = TypeVar("T")
_UNKNOWN: Final = re.compile("contains unknown field `(.*?)`")
_SAID_CHARACTERS: Final = 200


async def body_of(request: Request, kind: type[T], settings: HttpConfig) -> T:
    """Return the body of a request as what it must be; one without a body is taken for `{}`.

    Raises:
        InvalidRequest: It is none; with the nearest name where one is not known.
        ContentTypeMismatch, EncodingRefused, PayloadTooLarge: As `read_json`.
    """
    body = await read_json(request.receive, headers_of(request.scope), settings)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise _refusal("the body", kind, cause) from cause


def query_of(request: Request, kind: type[T]) -> T:
    """Return the query of a request as what it must be; of a name that comes twice the last counts.

    Raises:
        InvalidRequest: It is none.
    """
    given: Mapping[str, Any] = dict(request.query_params)
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as cause:
        raise _refusal("the query", kind, cause) from cause


def answer(body: object, status: int = 200) -> Response:
    """Return an answer of JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _refusal(what: str, kind: type, cause: Exception) -> InvalidRequest:
    said = str(cause)[:_SAID_CHARACTERS]  # it may quote the body
    unknown = _UNKNOWN.search(said)
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    near = difflib.get_close_matches(unknown[1], names, 1, 0.5) if unknown else []
    known = f"known here are {', '.join(names)}" if names else "none is known here"
    hint = f": did you mean {near[0]}?" if near else f": {known}" if unknown else ""
    return InvalidRequest(f"{what} is not what is asked for here: {said}{hint}")

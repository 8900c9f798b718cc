"""Heads of requests, as httptools parses them.

Source: RFC 9112 section 3 (request line), RFC 9110 section 7.8 (Upgrade).
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import unquote

import httptools

from headrace.errors import AmbiguousRequest, HeadersTooLarge
from headrace.http.request import MAX_HEAD_BYTES, Headers, RequestHead
from headrace.http.request_checks import MAX_HEADERS

_AUTHORITY: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_PLAIN_PATH: Final = re.compile(rb"(?:/[A-Za-z0-9._~-]+)+")
"""A usual path, which is decoded already and has no query."""


def request_parser(protocol: object) -> Any:
    """Return a parser of requests for a protocol."""
    parser: Any = httptools.HttpRequestParser(protocol)
    # The first of several requests gets its response, even if it ends the connection.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def head_without_upgrade(parser: Any, url: bytes, fields: Headers) -> bytes:
    """Return the head at which a parser stopped, without `Upgrade`. A server may ignore that header.

    Raises:
        AmbiguousRequest: It is a head of CONNECT, at which a parser always stops.
        HeadersTooLarge: It is above a limit with that header.
    """
    method = parser.get_method()
    if method == b"CONNECT":
        raise AmbiguousRequest("CONNECT asks for a tunnel, and Headrace is not a proxy")
    if len(fields) > MAX_HEADERS or is_long_head(url, fields):
        raise HeadersTooLarge(f"the head is above {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers: send less")
    lines = [b"%b: %b\r\n" % field for field in fields if field[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, parser.get_http_version().encode(), b"".join(lines))


def is_long_head(url: bytes, fields: Headers) -> bool:
    """Return whether a head is above the limit."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in fields) > MAX_HEAD_BYTES


def names_its_host(url: bytes, fields: Headers) -> bool:
    """Return whether the authority of an absolute-form target equals Host (RFC 9112 section 3.2.2)."""
    found = _AUTHORITY.match(url)
    return not found or found[1].lower() == dict(fields).get(b"host", b"").lower()


def head_of(parser: Any, url: bytes, fields: list[tuple[bytes, bytes]]) -> RequestHead:
    """Return a complete head."""
    method, version = parser.get_method().decode("ascii"), parser.get_http_version()
    keep_alive = version != "1.0" and parser.should_keep_alive()
    if _PLAIN_PATH.fullmatch(url):
        return RequestHead(method, url, url.decode("ascii"), b"", fields, version, keep_alive=keep_alive)
    found = httptools.parse_url(url)
    target = found.path or b"/"
    path = unquote(target.decode("ascii"))
    return RequestHead(method, target, path, found.query or b"", fields, version, keep_alive=keep_alive)

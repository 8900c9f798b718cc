"""Rejects requests by their head: an unknown Host, a foreign Origin, or a head that is ambiguous.

A web page can make a browser send requests to loopback, under the page's own name (DNS rebinding) or the listener's.
So an unknown Host and a foreign Origin are rejected in every mode. Source: RFC 9112 sections 3.2 and 6.3.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from headrace.config.http import HttpConfig
from headrace.errors import (
    AmbiguousRequest,
    HeadersTooLarge,
    InvalidRequest,
    OriginRefused,
    TooManyRecords,
    TransferCodingUnknown,
)
from headrace.http.request import MAX_HEAD_BYTES, HttpRequest

IDEMPOTENCY_KEY: Final = b"idempotency-key"
_KEY: Final = re.compile(rb"[\x20-\x7e]{1,255}")
_ONCE: Final = b"""
    host content-length transfer-encoding content-type content-encoding idempotency-key authorization
    x-scope-token origin
    """.split()
_VERSIONS: Final = ("1.1", "1.0")
_OWN_SITE: Final = (b"same-origin", b"none")
"""Values of a browser's `Sec-Fetch-Site`: the page has this origin, or the user typed the address."""
MAX_HEADERS: Final = 100
_MAX_PATH_BYTES: Final = 8192


class RequestChecks:
    """Checks heads against the names of this server."""

    def __init__(self, settings: HttpConfig) -> None:
        names = {"localhost", "127.0.0.1", "[::1]", settings.host, *settings.allowed_hosts}
        self._names = {name.lower().encode() for name in names}
        self._seen: set[bytes] = set()

    def check(self, request: HttpRequest) -> None:
        """Return if a request's head is acceptable.

        Raises:
            AmbiguousRequest: It is ambiguous.
            HeadersTooLarge: It has too many headers, or is too long.
            OriginRefused: It is for another site, or from one.
            TransferCodingUnknown: Its transfer coding is not `chunked`.
        """
        headers = request.head.headers
        given = len(request.head.fields)
        if given != len(headers) or given > MAX_HEADERS:
            self._check_headers(request)
        if request.head.is_long or len(request.head.target) + len(request.head.query) > _MAX_PATH_BYTES:
            raise HeadersTooLarge(f"the head is above {MAX_HEAD_BYTES} bytes, or the path above {_MAX_PATH_BYTES}")
        host = headers.get(b"host", b"")
        if host not in self._seen:
            self._check_host(request, host)
        if request.head.version not in _VERSIONS:
            raise AmbiguousRequest("the HTTP version is missing or not supported: use HTTP/1.1")
        if b"transfer-encoding" in headers:
            self._check_coding(request, headers[b"transfer-encoding"])
        if b"origin" in headers and headers[b"origin"].lower() != request.scheme.encode() + b"://" + host.lower():
            raise OriginRefused(
                "the Origin header names another site: web pages of other sites must not call this server"
            )

    def _check_headers(self, request: HttpRequest) -> None:
        names = [name for name, _ in request.head.fields]
        if len(names) > MAX_HEADERS:
            raise HeadersTooLarge(f"more than {MAX_HEADERS} headers: send fewer")
        if twice := next((name for name in _ONCE if names.count(name) > 1), None):
            raise AmbiguousRequest(f"the header {twice.decode()} is repeated: send it once")

    def _check_coding(self, request: HttpRequest, coding: bytes) -> None:
        if request.head.version == "1.0":
            raise AmbiguousRequest("HTTP/1.0 has no Transfer-Encoding: send Content-Length, or use HTTP/1.1")
        if coding.strip().lower() != b"chunked":
            shown = coding[:40].decode("latin-1")
            raise TransferCodingUnknown(
                f"Transfer-Encoding {shown!r} is not supported: send chunked alone, or Content-Length"
            )

    def _check_host(self, request: HttpRequest, host: bytes) -> None:
        if not host and request.head.version != "1.0":
            raise AmbiguousRequest("the Host header is missing: send it")
        name = host.lower()
        if not name.endswith(b"]"):  # not an IPv6 address without a port
            before, colon, port = name.rpartition(b":")
            name = before if colon and port.isdigit() else name
        if host and name not in self._names:
            shown = host[:100].decode("latin-1")
            raise OriginRefused(f"the Host header {shown!r} does not name this server (http.allowed_hosts)")
        if len(self._seen) < 1000:
            self._seen.add(host)

    def check_site(self, headers: Mapping[bytes, bytes], *, changes: bool) -> None:
        """Return unless a request changes state and a web page of another site sent it.

        A page can send a GET without an Origin, for example by an image. So the browser's `Sec-Fetch-Site` decides.

        Raises:
            OriginRefused: It is from another site.
        """
        if changes and headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
            raise OriginRefused("Sec-Fetch-Site names another site: web pages of other sites must not change anything")


def check_key(key: bytes) -> bytes:
    """Return the value of a header `Idempotency-Key`; InvalidRequest if it is not valid."""
    if not _KEY.fullmatch(key):
        raise InvalidRequest("Idempotency-Key is not valid: send 1 to 255 characters of visible ASCII")
    return key


def check_count(records: Sequence[object], max_records: int) -> None:
    """Raise TooManyRecords unless a request's records are within the limit."""
    if len(records) > max_records:
        raise TooManyRecords(
            f"{len(records)} records, and a request may have {max_records} (http.max_records): send several requests",
            limit_records=max_records,
        )

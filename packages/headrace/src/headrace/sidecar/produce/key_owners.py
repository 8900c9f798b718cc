"""Which of several processes remembers an idempotency key: the one that a hash of the key names.

A request that arrives at another one is forwarded. While that process is down, its keys are answered 503: another one
does not know whether the request was written.
"""

from collections.abc import Sequence
from typing import Final

from headrace.http.forwarding import Forwarder
from headrace.http.request import HttpRequest
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.records import OwningProcess
from headrace.sidecar.produce.idempotency import key_digest

_HASH_BYTES: Final = 8


class KeyOwners:
    """Finds the process of a key, and forwards its requests."""

    def __init__(self, forwarder: Forwarder, urls: Sequence[str], own: str) -> None:
        """Prepare; `urls` are those of all processes in the same order everywhere, and `own` is one of them."""
        self._forwarder = forwarder
        self._urls = urls
        self._own = own

    def is_own(self, digest: bytes) -> bool:
        """Return whether this process remembers a key, by its digest."""
        return self._url_of(digest) == self._own

    async def forward(self, request: HttpRequest, target: str, body: bytes) -> bool:
        """Forward a request to the process of its key; False if that is this one, or there is no key."""
        key = request.head.headers.get(IDEMPOTENCY_KEY)
        if key is None or request.caller.forwarded:
            return False
        url = self._url_of(key_digest(target, key))
        if url == self._own:
            return False
        await self._forwarder.forward(OwningProcess("", url, ""), "key", request, body)
        return True

    def _url_of(self, digest: bytes) -> str:
        return self._urls[int.from_bytes(digest[:_HASH_BYTES]) % len(self._urls)]

"""The correlation id of the present request, and new ids.

A new id is a UUIDv7 in URL-safe base64 without padding, 22 characters, as in the light-4j kafka-sidecar. It is made
in the base64 alphabet, because a request may need thousands. Source: RFC 9562 section 5.7 and method 1 of 6.2;
RFC 4648 section 5.
"""

import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from headrace.runtime import chance, clock

correlation_id: ContextVar[str] = ContextVar("correlation_id", default="")
"""Id of the request this task serves; empty outside of requests."""

caller: ContextVar[str] = ContextVar("caller", default="")
"""Name of the principal this task serves; empty when it is not known or authentication is off."""

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_PAIRS: Final = [bytes((a, b)) for a in _ALPHABET for b in _ALPHABET]
_ANY: Final = bytes(_ALPHABET[i % 64] for i in range(256))
_VERSION: Final = bytes(_ALPHABET[28 + i % 4] for i in range(256))  # 0111, then two random bits
_VARIANT: Final = bytes(_ALPHABET[2 + 4 * (i % 16)] for i in range(256))  # four random bits, then 10
_LAST: Final = bytes(_ALPHABET[16 * (i % 4)] for i in range(256))  # two random bits, then the padding


class _Burst:
    """The ids of one millisecond."""

    milliseconds = 0
    ids: Iterator[bytes] = iter(())


_burst: Final = _Burst()


def new_correlation_id() -> bytes:
    """Return one new id, ASCII."""
    return next(_ids())


def new_correlation_ids(count: int) -> list[bytes]:
    """Return new ids, ASCII, each once."""
    return [*itertools.islice(_ids(), count)]


def _ids() -> Iterator[bytes]:
    milliseconds = clock.time_ns() // 1_000_000
    if milliseconds != _burst.milliseconds:
        _burst.milliseconds, _burst.ids = milliseconds, _ids_of(milliseconds)
    return _burst.ids


def _ids_of(milliseconds: int) -> Iterator[bytes]:
    """Yield ids of a millisecond, each once. 4096 of them share their noise; 62 random bits remain."""
    time = b"".join([_PAIRS[milliseconds >> shift & 4095] for shift in (36, 24, 12, 0)])
    while True:
        noise = chance.getrandbits(96).to_bytes(12)  # ids are not secrets, and the kernel's numbers cost a call each
        head = time + bytes((_VERSION[noise[0]], _ANY[noise[1]], _VARIANT[noise[2]]))
        tail = noise[3:11].translate(_ANY) + bytes((_LAST[noise[11]],))
        for pair in _PAIRS:
            yield head + pair + tail

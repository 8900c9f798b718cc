"""Whether a transactional client may begin another transaction, judged by its own statistics.

In the client's protocol a late request to end a transaction can end the next one. A commit that timed out and was
retried returns as if nothing had happened. So after every transaction the guard looks for a sign that a request was
lost or sent twice. If there is one, the client is replaced: the broker then refuses every late request of the old one.
Source: KAFKA-17754, KIP-890.
"""

from typing import Final

import msgspec

MOST_TRANSACTIONS: Final = 10_000
"""Transactions of one client: its epoch has 16 bits, and the client does not check for their end."""
_SIGNS: Final = {
    "req_timeouts": "a request timed out",
    "txretries": "a request was sent again",
    "disconnects": "a broker closed the connection",
}


class _Broker(msgspec.Struct):
    req_timeouts: int
    txretries: int
    disconnects: int
    req: dict[str, int]


class _Statistics(msgspec.Struct):
    ts: int
    brokers: dict[str, _Broker]

    def count(self, sign: str) -> int:
        """Return a counter, summed over all connections."""
        return sum(getattr(broker, sign) for broker in self.brokers.values())

    @property
    def ends(self) -> int:
        """Requests that ended a transaction."""
        return sum(broker.req.get("EndTxn", 0) for broker in self.brokers.values())


_decode = msgspec.json.Decoder(_Statistics).decode


class TransactionGuard:
    """Reads the statistics of one client, on the thread that polls it. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._before: _Statistics | None = None
        self._latest: _Statistics | None = None
        self._since = float("inf")
        self._transactions = 0

    def observe(self, statistics: str) -> None:
        """Take the client's statistics."""
        self._latest = _decode(statistics)

    def opened(self, at: float) -> None:
        """Set when the client was ready for its first transaction; earlier statistics are ignored."""
        self._since = at

    def ended(self, at: float) -> None:
        """Set when a transaction ended."""
        self._since = at
        self._transactions += 1

    @property
    def fresh(self) -> bool:
        """Whether the statistics are younger than the end of the last transaction."""
        return self._latest is not None and self._latest.ts >= self._since * 1_000_000

    def problem(self) -> str:
        """Return why the client must not begin another transaction; empty if it may, as far as is known."""
        if self._before is None or self._latest is None:
            return ""
        if self._transactions >= MOST_TRANSACTIONS:
            return f"it has served {MOST_TRANSACTIONS} transactions"
        for sign, meaning in _SIGNS.items():
            if self._latest.count(sign) != self._before.count(sign):
                return meaning
        return "the end of a transaction was requested twice" if self._latest.ends > self._before.ends + 1 else ""

    def begin(self) -> None:
        """Compare from now on with the current statistics, in which `problem` has found nothing."""
        self._before = self._latest

"""How many deliveries a destination gets at a time, learned from what it does with them."""

from __future__ import annotations


class AdaptiveLimit:
    """Additive increase, multiplicative decrease, once per round trip at most.

    Latency is no signal here: the time a batch takes says more of its records than of a queue before the destination,
    and a limit that shrinks on it would let one slow key slow down the others. Source: RFC 5681 section 3.1.
    """

    def __init__(self, most: int) -> None:
        """Begin at the upper bound."""
        self.places = most
        """Deliveries under way at most, now."""
        self.under_way = 0
        self.most = most
        """The upper bound."""
        self._allowed = float(most)
        self._cut_at = 0

    def change(self, most: int) -> None:
        """Keep another upper bound; what was learned below it stays."""
        self._allowed = float(most) if self.places >= self.most else min(self._allowed, float(most))
        self.most, self.places = most, int(self._allowed)

    def grow(self) -> None:
        """Note that a delivery was answered; a bound that was not reached says nothing."""
        if self.places < self.most and self.under_way >= self.places:
            self._allowed += 1 / self._allowed
            self.places = int(self._allowed)

    def cut(self, ticket: int, newest: int) -> None:
        """Note that a delivery was pushed back; those that began before the last cut were part of the same crowd.

        Args:
            ticket: Number of the delivery.
            newest: Number of the delivery that began last.
        """
        if ticket > self._cut_at:
            self._cut_at = newest
            self._allowed = max(1.0, min(self._allowed, self.under_way) / 2)
            self.places = int(self._allowed)

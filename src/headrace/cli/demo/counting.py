"""What has come out so far, counted in the topics themselves and at the backend, never from Headrace's own word."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec

from headrace.config.kafka import KafkaConfig
from headrace.control.dead_letters import DeadLetterTopics
from headrace.control.lag import lag_of
from headrace.control.topics import read_window, window
from headrace.devcluster import RecordingBackend
from headrace.errors import NotFound
from headrace.kafka import Admin
from headrace.records import Record


class _Flight(msgspec.Struct):
    flight_id: str


class _Delay(msgspec.Struct):
    flights: int


_flight = msgspec.json.Decoder(_Flight).decode
_delay = msgspec.json.Decoder(_Delay).decode


class Counts(NamedTuple):
    """One look at everything."""

    enriched: int
    aggregated: int
    long_delays: int
    delivered: int
    delayed: int
    letters_left: int
    lag: int

    def settled(self, flights: int, long_delays: int, refused: int) -> bool:
        """Whether everything has come through, up to the letters."""
        return (
            self.enriched >= flights
            and self.lag == 0
            and self.delivered >= long_delays - refused
            and self.letters_left >= refused
        )

    def finished(self, long_delays: int) -> bool:
        """Whether the letters have come through too."""
        return self.delivered >= long_delays and self.letters_left == 0 and self.lag == 0


class Ledger:
    """Counts."""

    def __init__(
        self, kafka: KafkaConfig, backend: RecordingBackend, groups: Sequence[str], letters: str, tier: str
    ) -> None:
        self._kafka = kafka
        self._admin = Admin(kafka)
        self._backend = backend
        self._groups = groups
        self._letters = letters
        self._tier = tier

    async def quick(self) -> Counts:
        """Count by offsets: cheap, and an upper bound where a record was written twice."""
        return Counts(
            enriched=await self._end("flights.enriched"),
            aggregated=0,
            long_delays=await self._end("flights.long_delays"),
            delivered=len({record["value"]["flight_id"] for record in self._backend.accepted}),
            delayed=await self._end(self._tier),
            letters_left=await self._letters_left(),
            lag=await self._lag(),
        )

    async def exact(self) -> Counts:
        """Count different flights, and the newest row of each key, by reading the topics."""
        # Rows of one key are in one partition, so the one read last is the newest.
        newest = {record.key: _delay(record.value or b"").flights async for record in self._read("flights.delays")}
        return (await self.quick())._replace(
            enriched=await self._different("flights.enriched"),
            long_delays=await self._different("flights.long_delays"),
            aggregated=sum(newest.values()),
        )

    async def _different(self, topic: str) -> int:
        return len({_flight(record.value or b"").flight_id async for record in self._read(topic)})

    async def _read(self, topic: str) -> AsyncIterator[Record]:
        async for batch in read_window(self._kafka, *await window(self._admin, topic)):
            for record in batch:
                yield record

    async def _end(self, topic: str) -> int:
        return sum(end for _, end in (await self._admin.topic_offsets(topic)).values())

    async def _letters_left(self) -> int:
        (found,) = await DeadLetterTopics(self._kafka, self._admin).counts(self._letters)
        return found.left

    async def _lag(self) -> int:
        """Return the records behind over all groups; a group that has not committed yet is behind by one at least."""
        total = 0
        for group in self._groups:
            try:
                total += sum(entry.lag for entry in await lag_of(self._admin, group))
            except NotFound:
                total += 1
        return total

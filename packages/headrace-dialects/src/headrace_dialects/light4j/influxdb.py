"""Metrics in InfluxDB's line protocol, with light-4j's counters and timer of requests.

Measurements, tags and fields are those that Telegraf gives to Prometheus metrics (`metric_version = 1`). Source:
InfluxData's reference of the line protocol; light-4j's `InfluxDbReporter` for the names of its measurements.
"""

import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import parse_qs, urlsplit

from headrace.runtime.telemetry.metrics import ANONYMOUS, Snapshot

_MAX_LINES: Final = 5_000
"""Of one request."""
_MAX_SERIES: Final = 1_000
"""Of endpoint and client."""
_NANOSECONDS: Final = {"s": 10**9, "ms": 10**6, "u": 10**3, "us": 10**3, "m": 60 * 10**9, "h": 3600 * 10**9}
_SPECIAL: Final = re.compile(r"([,= ])")
_IN_MEASUREMENTS: Final = re.compile(r"([, ])")
_ENDS: Final = re.compile(r"\\(?=\\*(?:[,= ]|$))")
_FIELDS: Final = {"counter": "counter", "gauge": "gauge"}


def escaped(text: str, special: re.Pattern[str] = _SPECIAL) -> str:
    """Return a measurement, a tag or the key of a field, escaped.

    A backslash cannot be escaped, so one before a special character or at the end becomes `/`.
    """
    return special.sub(r"\\\1", _ENDS.sub("/", " ".join(text.split("\n")).replace("\r", " ")))


def line(measurement: str, tags: Mapping[str, str], fields: Mapping[str, float], at: int) -> str:
    """Return one line; empty if no field is a number. Every field is a float, so that its type never changes."""
    shown = ",".join(f"{escaped(key)}={float(value)!r}" for key, value in fields.items() if math.isfinite(value))
    # Sorted tags are fastest for the server; a tag without a value is not allowed.
    pairs = "".join(f",{escaped(key)}={escaped(value)}" for key, value in sorted(tags.items()) if value)
    return f"{escaped(measurement, _IN_MEASUREMENTS)}{pairs} {shown} {at}" if shown else ""


class _Requests:
    """Requests of one client to one endpoint since the last push that was accepted."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("request", "success", "auth_error", "request_error", "server_error"), 0)
        self.seconds, self.least, self.most = 0.0, math.inf, 0.0

    def add(self, kind: str, seconds: float) -> None:
        self.counts["request"] += 1
        if kind:
            self.counts[kind] += 1
        self.seconds += seconds
        self.least, self.most = min(self.least, seconds), max(self.most, seconds)

    def lines(self, prefix: str, tags: Mapping[str, str], at: int) -> Iterator[str]:
        """Yield the counters, and the timer in milliseconds."""
        for name, count in self.counts.items():
            yield line(f"{prefix}.{name}.count", tags, {"value": count}, at)
        times = {"min": self.least, "max": self.most, "mean": self.seconds / self.counts["request"]}
        for name, seconds in times.items():
            yield line(f"{prefix}.response_time.{name}", tags, {"value": seconds * 1000}, at)


class InfluxLines:
    """The bodies of pushes, and the requests that light-4j would count."""

    def __init__(self, url: str, service_id: str, host: str) -> None:
        """Prepare; `service_id` and `host` are tags of every line."""
        precision = parse_qs(urlsplit(url).query).get("precision", ["ns"])[-1]
        self._unit = _NANOSECONDS.get(precision, 1)
        self._service_id = service_id
        self._tags = {"api": service_id, "host": host}
        self._requests: dict[tuple[str, str], _Requests] = {}
        self._taken: dict[tuple[str, str], _Requests] = {}
        self._in_bodies: list[list[tuple[str, str]]] = []
        """The requests that each body of the present push has, by endpoint and client."""

    def request(self, route: str, principal: str, status: int, seconds: float) -> None:
        """Count an answered request under light-4j's names."""
        kind = "server_error" if status >= 500 else "request_error" if status >= 400 else ""
        kind = "auth_error" if status in (401, 403) else "success" if 200 <= status < 400 else kind
        key = route, principal
        if key not in self._requests and len(self._requests) >= _MAX_SERIES:
            key = "other", "other"
        self._requests.setdefault(key, _Requests()).add(kind, seconds)

    def take(self) -> None:
        """Take the requests since the last push that was accepted."""
        self._taken = {key: _copy(found) for key, found in self._requests.items()}

    def encode(self, snapshot: Snapshot) -> list[bytes]:
        """Return the lines of every metric, at most 5,000 in a body, and those of an endpoint and client in one."""
        at = time.time_ns() // self._unit
        own = [one for one in self._own(snapshot, at) if one]
        bodies = [own[start : start + _MAX_LINES] for start in range(0, len(own), _MAX_LINES)] or [[]]
        self._in_bodies = [[] for _ in bodies]
        for key, found in self._taken.items():
            lines = [one for one in self._of_light4j(key, found, at) if one]
            if len(bodies[-1]) + len(lines) > _MAX_LINES:
                bodies.append([])
                self._in_bodies.append([])
            bodies[-1] += lines
            self._in_bodies[-1].append(key)
        return ["\n".join(body).encode() for body in bodies]

    def accepted(self, body: int) -> None:
        """Forget the requests that a body had, and keep those after them."""
        for key in self._in_bodies[body]:
            taken, now = self._taken[key], self._requests[key]
            if now.counts == taken.counts:
                del self._requests[key]
            else:
                now.seconds -= taken.seconds
                now.counts = {name: count - taken.counts[name] for name, count in now.counts.items()}

    def _own(self, snapshot: Snapshot, at: int) -> Iterator[str]:
        for family in snapshot.families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if family.type == "histogram":
                series: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
                for sample in family.samples:
                    labels = {key: value for key, value in sample.labels.items() if key != "le"}
                    field = sample.labels.get("le") or sample.name.rpartition("_")[2]
                    series.setdefault(tuple(labels.items()), {})[field] = sample.value
                for key, fields in series.items():
                    yield line(name, self._tags | dict(key), fields, at)
                continue
            for sample in family.samples:
                yield line(name, self._tags | sample.labels, {_FIELDS.get(family.type, "value"): sample.value}, at)

    def _of_light4j(self, key: tuple[str, str], found: _Requests, at: int) -> Iterator[str]:
        endpoint, client = key
        tags = self._tags | {"endpoint": endpoint}
        yield from found.lines(self._service_id, tags | {"clientId": client}, at)
        if client != ANONYMOUS:  # light-4j has the series of a client a second time
            yield from found.lines(client, tags, at)


def _copy(found: _Requests) -> _Requests:
    copy = _Requests()
    copy.counts, copy.seconds, copy.least, copy.most = dict(found.counts), found.seconds, found.least, found.most
    return copy

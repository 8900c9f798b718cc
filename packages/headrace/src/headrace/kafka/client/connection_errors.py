"""Explains why a client does not reach a broker: cause and fix, for the log, readiness, HTTP and commands.

The client reports it; nothing is sent to find out more. A cluster that has answered this process has the right kind of
listener, so then a closed connection means only that.
"""

import csv
import re
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaTls
from headrace.kafka.client import library

_Error = library.KafkaError
_SIZE = re.compile(r"Invalid response size (-?\d+)")
_CUT_LOGIN = "supported mechanisms: (n/a)"
_AGO = re.compile(r" \(after \d+ms in state \w+.*$", re.DOTALL)
_ADDRESS = re.compile(r"(?:\w+://)?([^\s/]+)/\w+: (.*)", re.DOTALL)
_OAUTH_ERROR = re.compile(r'(?:"error"\s*:\s*|error response \{)"(\w{1,40})"')
_CERTIFICATE_REQUIRED = re.compile(r"alert number (?:40|42|46)\b|alert: (?:bad_certificate|certificate_required)")
_OFFERED = re.compile(r"(?:supported mechanisms:|enabled mechanisms are) \[?([^\]]*)")
_TEXT_LENGTH = 200
_CLOSED: Final = "closed"
_ALERT: Final = b"\x15\x03"
"""An alert of TLS (RFC 8446, 5.1)."""
_OF_THE_NETWORK = (
    ("Connection refused", "connection refused by"),
    ("timed out", "timed out at"),
    ("isconnected", "connection closed by"),
)
_OTHER_KIND: Final = "other kind"
"""A problem that the listener does not state: a broker that stops closes connections in the same way."""
_NO_LISTENER = ("connection refused by", "unknown host")


class ConnectionProblem(NamedTuple):
    """Why no broker is reached."""

    why: str
    fix: str = ""
    """What to do; empty if the network or the broker is down."""
    refused: bool = False
    """Whether every retry fails until a setting changes, on either side."""
    name: str = ""
    """Its name in `connection_errors.csv`."""
    address: str = ""
    """The broker concerned."""

    def __str__(self) -> str:
        return f"{self.why}: {self.fix}" if self.fix else self.why


def _read_table() -> tuple[dict[str, ConnectionProblem], list[tuple[re.Pattern[str], str]]]:
    with Path(__file__).with_name("connection_errors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    problems = {r["name"]: ConnectionProblem(r["why"], r["fix"], r["refused"] == "yes", r["name"]) for r in rows}
    return problems, [(re.compile(row["pattern"], re.IGNORECASE), row["name"]) for row in rows if row["pattern"]]


PROBLEMS, _PATTERNS = _read_table()
"""Templates of every problem of TLS and login by name, and the patterns of the client's texts, in order."""


def plain_reason(error: Any, kafka: KafkaConfig) -> ConnectionProblem | None:
    """Return why a client does not reach a broker; None if its error is about something else."""
    text, code = _AGO.sub("", error.str()), error.code()
    found = _ADDRESS.match(text)
    address, reason = found.groups() if found else (text.partition("/")[0], text.partition(": ")[2] or text)
    if code == _Error._RESOLVE:
        return ConnectionProblem(f"unknown host {address}")
    if _CUT_LOGIN in text:  # the client's own words for a connection that ends before the list of mechanisms
        if "imed out" in text:
            return ConnectionProblem(f"timed out at {address}", address=address)
        return ConnectionProblem(f"connection closed by {address}", name=_CLOSED, address=address)
    if code in (_Error._AUTHENTICATION, _Error._SSL, _Error._TRANSPORT):
        by_code = {_Error._AUTHENTICATION: "login", _Error._SSL: "TLS"}.get(code, "")
        if name := _name_of(text, kafka, by_code):
            return _named(name, kafka, text, address=address, text=reason[:_TEXT_LENGTH])
    if size := _SIZE.search(reason):
        return _of_first_bytes(int(size[1]).to_bytes(4, signed=True), address, kafka)
    for sign, words in _OF_THE_NETWORK:
        if sign in reason:
            name = _CLOSED if words.startswith("connection closed") else ""
            return ConnectionProblem(f"{words} {address}", name=name, address=address)
    return ConnectionProblem(f"{address}: {reason}") if code in (_Error._TRANSPORT, _Error._BAD_MSG) else None


def _of_first_bytes(first: bytes, address: str, kafka: KafkaConfig) -> ConnectionProblem | None:
    """Return the problem of a server whose response begins in this way, where Kafka has a length; None if it may."""
    if first == b"HTTP":
        return _named("HTTP", kafka, address=address)
    if first[:2] == _ALERT:
        return _named("TLS required", kafka, address=address)
    if first.isascii() and first.decode().isprintable():
        return _named("another protocol", kafka, address=address, text=first.decode())
    return None


def refused_by_java(reported: str, kafka: KafkaConfig) -> ConnectionProblem:
    """Return why brokers refuse Java's client, from its exceptions; `token: ` precedes what is about a token."""
    name = _name_of(reported, kafka, "TLS" if "Ssl" in reported else "login")
    return _named(name, kafka, reported, address=kafka.bootstrap_servers, text=reported[-_TEXT_LENGTH:])


def _name_of(reported: str, kafka: KafkaConfig, otherwise: str) -> str:
    tls = kafka.security.tls or KafkaTls()
    if _CERTIFICATE_REQUIRED.search(reported) and not (tls.certificate or tls.keystore):
        return "no certificate"
    return next((name for pattern, name in _PATTERNS if pattern.search(reported)), otherwise)


def _named(name: str, kafka: KafkaConfig, reported: str = "", *, address: str, text: str = "") -> ConnectionProblem:
    sasl = kafka.security.in_use.sasl
    template = PROBLEMS[name]
    oauth_error = _OAUTH_ERROR.search(reported)
    offered = _OFFERED.search(reported)
    values = {
        "address": address,
        "text": text,
        "user": sasl.username if sasl else "",
        "mechanism": sasl.mechanism if sasl else "",
        "offered": offered[1] if offered else "",
        "protocol": kafka.security.effective_protocol,
        # A query may hold a secret, and so may any other word of the token server's response.
        "token_url": urlsplit(sasl.oauth.token_url)._replace(query="").geturl() if sasl and sasl.oauth else "",
        "oauth_error": f" ({oauth_error[1]})" if oauth_error else "",
    }
    why, fix = template.why.format_map(values), template.fix.format_map(values)
    return template._replace(why=why, fix=fix, address=address)


class ConnectionErrors:
    """The errors that the clients of one cluster report while no broker answers; for any thread."""

    def __init__(self, kafka: KafkaConfig) -> None:
        self._kafka = kafka
        self.has_answered = False
        """Whether the cluster has ever answered this process."""
        self._last: ConnectionProblem | None = None
        self._none_left = False

    def take(self, error: Any) -> None:
        if error.code() == _Error._ALL_BROKERS_DOWN:
            self._none_left = True
        else:
            self._last = plain_reason(error, self._kafka) or self._last

    def clear(self) -> None:
        """Forget every error: a broker has answered."""
        self._last, self._none_left, self.has_answered = None, False, True

    def last(self) -> ConnectionProblem | None:
        """Return the latest problem."""
        found = self._last
        if self.has_answered and found and found.name == _OTHER_KIND:
            return ConnectionProblem(f"connection closed by {found.address}", name=_CLOSED, address=found.address)
        encrypted = self._kafka.security.effective_protocol.endswith("ssl")
        closed = found.name == _CLOSED and encrypted if found else self._none_left
        if self.has_answered or not closed:
            return found
        return _named(_OTHER_KIND, self._kafka, address=found.address if found else self._kafka.bootstrap_servers)

    @property
    def no_listener(self) -> bool:
        """Whether a client has no broker left to try, because none listens at its address."""
        return self._none_left and self._last is not None and self._last.why.startswith(_NO_LISTENER)

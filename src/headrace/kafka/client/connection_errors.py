"""Explains why a client does not reach a broker: cause and fix, for the log, readiness, HTTP and commands.

The client does not name the cause when it rejects a broker's certificate or a listener closes the connection at once.
Then a TLS handshake with the same address finds the cause. It sends no login and no request.
"""

import csv
import re
import socket
import ssl
import time
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaTls, is_pem

_Error = confluent_kafka.KafkaError
_AGO = re.compile(r" \(after \d+ms in state \w+.*$", re.DOTALL)
_ADDRESS = re.compile(r"(?:\w+://)?([^\s/]+)/\w+: (.*)", re.DOTALL)
_OAUTH_ERROR = re.compile(r'(?:"error"\s*:\s*|error response \{)"(\w{1,40})"')
_CERTIFICATE_REQUIRED = re.compile(r"alert number (?:40|42|46)\b|alert: (?:bad_certificate|certificate_required)")
_OFFERED = re.compile(r"(?:supported mechanisms:|enabled mechanisms are) \[?([^\]]*)")
_TEXT_LENGTH = 200
_HANDSHAKE_SECONDS = 1.0
_KNOWN_SECONDS = 10.0
_UNVERIFIED: Final = "broker's certificate"
_CLOSED: Final = "closed"
_VERIFY_CODES = {9: "broker's dates", 10: "broker's dates", 62: "host name", 64: "host name"}
"""Not yet valid, expired, another name, another address; source: OpenSSL, X509_V_ERR_*."""
_OF_THE_NETWORK = (
    ("Connection refused", "connection refused by"),
    ("timed out", "timed out at"),
    ("isconnected", "connection closed by"),
)
_NO_LISTENER = ("connection refused by", "unknown host")


class ConnectionProblem(NamedTuple):
    """Why no broker is reached."""

    why: str
    """The cause."""
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


def _read() -> tuple[dict[str, ConnectionProblem], list[tuple[re.Pattern[str], str]]]:
    with Path(__file__).with_name("connection_errors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    problems = {r["name"]: ConnectionProblem(r["why"], r["fix"], r["refused"] == "yes", r["name"]) for r in rows}
    return problems, [(re.compile(row["pattern"], re.IGNORECASE), row["name"]) for row in rows if row["pattern"]]


PROBLEMS, _PATTERNS = _read()
"""Templates of every problem of TLS and login by name, and the patterns of the client's texts, in order."""


def plain_reason(error: Any, kafka: KafkaConfig) -> ConnectionProblem | None:
    """Return why a client does not reach a broker; None if its error is about something else."""
    text, code = _AGO.sub("", error.str()), error.code()
    found = _ADDRESS.match(text)
    address, reason = found.groups() if found else (text.partition("/")[0], text.partition(": ")[2] or text)
    if code == _Error._RESOLVE:
        return ConnectionProblem(f"unknown host {address}")
    if code in (_Error._AUTHENTICATION, _Error._SSL, _Error._TRANSPORT):
        by_code = {_Error._AUTHENTICATION: "login", _Error._SSL: "TLS"}.get(code, "")
        if name := _name_of(text, kafka, by_code):
            return _named(name, kafka, text, address=address, text=reason[:_TEXT_LENGTH])
    for sign, words in _OF_THE_NETWORK:
        if sign in reason:
            name = _CLOSED if words.startswith("connection closed") else ""
            return ConnectionProblem(f"{words} {address}", name=name, address=address)
    return ConnectionProblem(f"{address}: {reason}") if code in (_Error._TRANSPORT, _Error._BAD_MSG) else None


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
        self._last: ConnectionProblem | None = None
        self._none_left = False
        self._inspected: tuple[float, ConnectionProblem | None, ConnectionProblem | None] | None = None

    def take(self, error: Any) -> None:
        """Take an error of a client."""
        if error.code() == _Error._ALL_BROKERS_DOWN:
            self._none_left = True
        else:
            self._last = plain_reason(error, self._kafka) or self._last

    def clear(self) -> None:
        """Forget every error: a broker has answered."""
        self._last, self._none_left, self._inspected = None, False, None

    def last(self) -> ConnectionProblem | None:
        """Return the latest problem, without contact to a broker."""
        last, inspected = self._last, self._inspected
        return (inspected[2] if inspected and inspected[1] == last else None) or last

    @property
    def no_listener(self) -> bool:
        """Whether a client has no broker left to try, because none listens at its address."""
        return self._none_left and self._last is not None and self._last.why.startswith(_NO_LISTENER)

    def find(self) -> ConnectionProblem | None:
        """Return the latest problem. If the client did not name the cause, a handshake finds it; that may block."""
        last, inspected = self._last, self._inspected
        encrypted = self._kafka.security.effective_protocol.endswith("ssl")
        unknown = last.name in (_UNVERIFIED, _CLOSED if encrypted else "-") if last else self._none_left
        known = inspected and inspected[1] == last and time.monotonic() - inspected[0] < _KNOWN_SECONDS
        if unknown and not known:
            self._inspected = time.monotonic(), last, self._inspect(last)
        return self.last()

    def _inspect(self, last: ConnectionProblem | None) -> ConnectionProblem | None:
        security = self._kafka.security.in_use
        encrypted = security.effective_protocol.endswith("ssl")
        login = "" if security.sasl else "login required"
        meaning = {_CLOSED: "no TLS"} if last else {"ok": login if encrypted else "TLS required", _CLOSED: login}
        for address in [last.address] if last else self._kafka.bootstrap_servers.split(","):
            found = _handshake(address.strip(), (security.tls or KafkaTls()) if encrypted else None)
            name = found if last and last.name == _UNVERIFIED else meaning.get(found, "")
            if name in PROBLEMS:
                return _named(name, self._kafka, address=address.strip())
        return None


def _handshake(address: str, tls: KafkaTls | None) -> str:
    """Do a TLS handshake, which checks the broker's certificate if there are settings.

    Return the name of a problem, `ok`, `closed` if the listener closes the connection, or "" if nothing is known.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = bool(tls and tls.verify_certificate and tls.verify_host_name)
    context.verify_mode = ssl.CERT_REQUIRED if tls and tls.verify_certificate else ssl.CERT_NONE
    try:
        if tls and tls.ca:
            context.load_verify_locations(**{"cadata" if is_pem(tls.ca) else "cafile": tls.ca})
        else:
            context.load_default_certs()
        with (
            socket.create_connection((host.strip("[]"), int(port)), _HANDSHAKE_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")),
        ):
            return "ok"
    except ssl.SSLCertVerificationError as cause:
        return _VERIFY_CODES.get(cause.verify_code, "authority")
    except (ssl.SSLEOFError, ConnectionResetError):
        return _CLOSED
    except ssl.SSLError as cause:
        return "ok" if "ALERT" in (cause.reason or "") else ""
    except (OSError, ValueError):
        return ""

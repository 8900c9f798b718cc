"""Explains why a client does not reach a broker: cause and fix, for the log, readiness, HTTP and commands.

The client does not name the cause when it rejects a broker's certificate or a listener closes the connection at once.
Then Headrace contacts the same address to find the cause: with TLS settings by a TLS handshake, and otherwise by
`ApiVersions` in plain text first, which every plain listener answers. It sends no login. A cluster that has answered
this process has the right kind of listener. So nothing is sent then, and a closed connection means only that.
"""

import contextlib
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
_SIZE = re.compile(r"Invalid response size (-?\d+)")
_CUT_LOGIN = "supported mechanisms: (n/a)"
_AGO = re.compile(r" \(after \d+ms in state \w+.*$", re.DOTALL)
_ADDRESS = re.compile(r"(?:\w+://)?([^\s/]+)/\w+: (.*)", re.DOTALL)
_OAUTH_ERROR = re.compile(r'(?:"error"\s*:\s*|error response \{)"(\w{1,40})"')
_CERTIFICATE_REQUIRED = re.compile(r"alert number (?:40|42|46)\b|alert: (?:bad_certificate|certificate_required)")
_OFFERED = re.compile(r"(?:supported mechanisms:|enabled mechanisms are) \[?([^\]]*)")
_TEXT_LENGTH = 200
_CONTACT_SECONDS = 1.0
_KNOWN_SECONDS = 10.0
_UNVERIFIED: Final = "broker's certificate"
_CLOSED: Final = "closed"
_TLS: Final = "TLS listener"
_ALERT: Final = b"\x15\x03"
"""An alert of TLS (RFC 8446, 5.1)."""
_VERIFY_CODES = {9: "broker's dates", 10: "broker's dates", 62: "host name", 64: "host name"}
"""Not yet valid, expired, another name, another address; source: OpenSSL, X509_V_ERR_*."""
_OF_THE_NETWORK = (
    ("Connection refused", "connection refused by"),
    ("timed out", "timed out at"),
    ("isconnected", "connection closed by"),
)
_GUESSED: Final = "no TLS"
"""A problem that the listener does not state: a broker that stops closes connections in the same way."""
_API_VERSIONS = bytes.fromhex("0000000f 0012 0000 00000001 0005") + b"probe"
_SASL_HANDSHAKE = bytes.fromhex("00000015 0011 0001 00000002 0005") + b"probe" + bytes.fromhex("0004") + b"NONE"
"""Kafka's requests 18 and 17, the second with a mechanism that no listener has. A response has its number after four
bytes of length."""
_WITHOUT_LOGIN = bytes.fromhex("0022")
"""ILLEGAL_SASL_STATE: the response of a listener that has no login."""
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
        words = "timed out at" if "imed out" in text else "connection closed by"
        return ConnectionProblem(f"{words} {address}", name=_CLOSED, address=address)
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
        self._inspected: tuple[float, ConnectionProblem | None, ConnectionProblem | None] | None = None

    def take(self, error: Any) -> None:
        """Take an error of a client."""
        if error.code() == _Error._ALL_BROKERS_DOWN:
            self._none_left = True
        else:
            self._last = plain_reason(error, self._kafka) or self._last

    def clear(self) -> None:
        """Forget every error: a broker has answered."""
        self._last, self._none_left, self._inspected, self.has_answered = None, False, None, True

    def last(self) -> ConnectionProblem | None:
        """Return the latest problem, without contact to a broker."""
        last, inspected = self._last, self._inspected
        found = (inspected[2] if inspected and inspected[1] == last else None) or last
        if found and self.has_answered and found.name == _GUESSED:
            return ConnectionProblem(f"connection closed by {found.address}", name=_CLOSED, address=found.address)
        return found

    @property
    def no_listener(self) -> bool:
        """Whether a client has no broker left to try, because none listens at its address."""
        return self._none_left and self._last is not None and self._last.why.startswith(_NO_LISTENER)

    def find(self) -> ConnectionProblem | None:
        """Return the latest problem. If the client did not name the cause, contact finds it; that may block."""
        last, inspected = self._last, self._inspected
        encrypted = self._kafka.security.effective_protocol.endswith("ssl")
        closed = last.name == _CLOSED and encrypted if last else self._none_left
        unknown = (closed and not self.has_answered) or (last is not None and last.name == _UNVERIFIED)
        known = inspected and inspected[1] == last and time.monotonic() - inspected[0] < _KNOWN_SECONDS
        if unknown and not known:
            self._inspected = time.monotonic(), last, self._inspect(last)
        return self.last()

    def _inspect(self, last: ConnectionProblem | None) -> ConnectionProblem | None:
        security = self._kafka.security.in_use
        encrypted = security.effective_protocol.endswith("ssl")
        for address in [last.address] if last else self._kafka.bootstrap_servers.split(","):
            address = address.strip().rpartition("://")[2]
            name = _look(address, (security.tls or KafkaTls()) if encrypted else None)
            if last and last.name != _UNVERIFIED:
                name = _GUESSED if name == _CLOSED else ""
            if name == "login required" and security.sasl:
                name = ""
            if name in PROBLEMS:
                return _named(name, self._kafka, address=address)
        return None


def _look(address: str, tls: KafkaTls | None) -> str:
    """Return the name of a problem with a listener, `closed` if it closes the connection, or "" if nothing is known."""
    host, _, port = address.rpartition(":")
    try:
        server = host.strip("[]"), int(port)
        if tls:
            return _handshake(server, tls)
        with socket.create_connection(server, _CONTACT_SECONDS) as connection:
            found = _greet(connection)
    except (OSError, ValueError):
        return ""
    # Only a listener that closes a plain connection gets a greeting of TLS: other brokers log that as an error.
    spoken = _handshake(server, None) if found == _CLOSED else ""
    return {_TLS: "TLS required", "login required": "TLS required", "HTTP": "HTTP"}.get(spoken, found)


def _greet(connection: socket.socket) -> str:
    """Ask a listener for its versions and its logins; return what `_look` does."""
    try:
        connection.sendall(_API_VERSIONS)
        first = _read(connection, 8)
        if first[:4] == b"HTTP":
            return "HTTP"
        if first[4:] != b"\0\0\0\1":
            return _CLOSED if not first or first[:2] == _ALERT else ""
        _read(connection, int.from_bytes(first[:4]) - 4)
        connection.sendall(_SASL_HANDSHAKE)
        response = _read(connection, 10)
    except ConnectionResetError:
        return _CLOSED
    is_response = response[4:8] == b"\0\0\0\2" and len(response) == 10
    return "login required" if is_response and response[8:] != _WITHOUT_LOGIN else ""


def _read(connection: socket.socket, size: int) -> bytes:
    """Read this many bytes, or fewer if the other side closes the connection; raises an error if it takes long."""
    read = b""
    while len(read) < size and (more := connection.recv(size - len(read))):
        read += more
    return read


def _handshake(server: tuple[str, int], tls: KafkaTls | None) -> str:
    """Do a TLS handshake, which checks the broker's certificate if there are settings; then ask as in plain text.

    Return what `_look` does, or `TLS` if the listener has TLS and nothing else is known.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = bool(tls and tls.verify_certificate and tls.verify_host_name)
    context.verify_mode = ssl.CERT_REQUIRED if tls and tls.verify_certificate else ssl.CERT_NONE
    try:
        if tls and tls.ca:
            context.load_verify_locations(**{"cadata" if is_pem(tls.ca) else "cafile": tls.ca})
        else:
            context.load_default_certs()
        with (
            socket.create_connection(server, _CONTACT_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=server[0]) as encrypted,
        ):
            with contextlib.suppress(OSError):
                found = _greet(encrypted)
                return _TLS if found in ("", _CLOSED) else found
            return _TLS
    except ssl.SSLCertVerificationError as cause:
        return _VERIFY_CODES.get(cause.verify_code, "authority")
    except (ssl.SSLEOFError, ConnectionResetError):
        return _CLOSED
    except ssl.SSLError as cause:
        return _TLS if "ALERT" in (cause.reason or "") else ""
    except (OSError, ValueError):
        return ""

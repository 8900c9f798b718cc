"""Backends: where reactive consumers deliver, and how."""

import re
import socket
import ssl
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from headrace.config.section import PositiveSeconds, Section, Url

_METADATA = frozenset(
    map(ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Metadata services that are not link-local."""
_METADATA_NAMES = ("metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal")
_NAT64, _COMPATIBLE = ip_network("64:ff9b::/96"), ip_network("::/96")


def forbidden_host(host: str) -> str:
    """Return why a host, as `urlsplit` returns it, must not be a backend; empty if it may be one.

    Numbers in every notation that resolvers accept (decimal, octal, hexadecimal, shortened) are read as addresses. The
    address of any other name is checked after DNS resolution: see `forbidden_address`.
    """
    name = host.rstrip(".")
    if name in _METADATA_NAMES:
        return f"{host} is a cloud's metadata service"
    try:
        return forbidden_address(str(IPv4Address(socket.inet_aton(name))))
    except OSError:
        return forbidden_address(name)


def forbidden_address(address: str) -> str:
    """Return why an address must not be connected to; empty if it may be, or is not an address."""
    try:
        ip = _parsed(address)
    except ValueError:
        return ""
    if ip.is_link_local:
        return f"{ip} is a link-local address, where metadata services are"
    return f"{ip} is a cloud's metadata service" if ip in _METADATA else ""


def is_this_machine(address: str) -> bool:
    """Return whether an IP address is loopback, unspecified or multicast."""
    ip = _parsed(address)
    return ip.is_loopback or ip.is_unspecified or ip.is_multicast


def _parsed(address: str) -> IPv4Address | IPv6Address:
    ip = ip_address(address.partition("%")[0])
    return (_inner(ip) or ip) if isinstance(ip, IPv6Address) and not ip.is_loopback else ip


def _inner(ip: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address inside an IPv6 address; None if there is none."""
    if ip in _NAT64 or ip in _COMPATIBLE:
        return IPv4Address(ip.packed[12:])
    return ip.ipv4_mapped or ip.sixtofour


HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
FRAMING: Final = re.compile(
    "host|te|trailer|expect|upgrade|(proxy-)?connection|keep-alive|content-length|(transfer|accept)-encoding", re.I
)
"""Headers that control how a request is parsed; only the HTTP client sets them."""


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of an HTTP header: correct it")
        if FRAMING.fullmatch(name):
            raise ValueError(f"has {name}, which Headrace sets itself: remove it")
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"the value of {name} has characters other than printable ASCII: encode it")
    if len({name.lower() for name in headers}) < len(headers):
        raise ValueError("has the same name in two spellings: keep one")
    return headers


Headers = Annotated[dict[str, str], AfterValidator(_sendable)]


class ClientTls(Section):
    """TLS to an HTTP server, 1.2 or newer. The server's name and certificate are always checked. Files are PEM, with
    paths relative to this file, and are reloaded when they change."""

    ca: Path | None = None
    """Authorities to trust for the server's certificate, instead of the system's."""
    certificate: Path | None = None
    """Client certificate with its chain."""
    key: Path | None = None
    """Private key of the certificate, without a password; no other user may read the file."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("needs certificate and key together: set both, or neither")
        return self


def connection_problem(cause: OSError | None, section: str = "") -> str:
    """Return why a connection to an HTTP server failed, and the next step; `section` ends with a dot or is empty."""
    match cause:
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted: {cause.verify_message}. Correct the host in {section}url, renew the "
                f"certificate, or set its authority in {section}tls.ca"
            )
        case ssl.SSLError():
            return (
                f"the TLS handshake failed ({cause.reason or cause}): does the server speak plain HTTP, or is "
                f"{section}tls.certificate missing?"
            )
        case socket.gaierror():
            return f"its name cannot be resolved ({cause.strerror}): correct the host in {section}url"
        case ConnectionRefusedError():
            return f"no process listens there: start it, or correct the port in {section}url"
        case TimeoutError():
            return (
                f"the connection timed out ({section}timeout_seconds): is the server up, or does a firewall block it?"
            )
        case _:
            return f"no connection ({(cause and cause.strerror) or cause})"


def is_protected(url: str) -> bool:
    """Return whether a URL is https, or loopback."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1", "::1")


def encrypted(url: str) -> str:
    """Return a URL that is safe to send secrets to."""
    if not is_protected(url):
        raise ValueError("is not https, so the network could read the secret: use https")
    return url


class OAuth(Section):
    """A token for every request, fetched with client credentials (RFC 6749, 4.4)."""

    token_url: Annotated[Url, AfterValidator(encrypted)]
    """Token endpoint of the authorization server; `https`, or loopback."""
    client_id: Annotated[str, Field(min_length=1)]
    """Client id at that server."""
    client_secret: SecretStr
    """Client secret."""
    scope: str = ""
    """Scopes to request, separated by blanks; empty for the server's default."""
    audience: str = ""
    """Audience of the token, if the server requires one."""


BackendMode = Literal["results", "status", "single", "cloudevents_structured", "cloudevents_binary"]
ONE_RECORD_MODES = ("single", "cloudevents_structured", "cloudevents_binary")
"""Modes with one record per request."""


class BackendHealth(Section):
    """The health check that must succeed before the first record is consumed."""

    path: Annotated[str, Field(pattern=r"^/[!-\[\]-~]*$")]
    """Path (and query) of a GET request to the backend's host; any 2xx means ready."""


class BackendConfig(Section):
    """The HTTP endpoint that a reactive consumer delivers to."""

    url: Url
    """URL that records are posted to."""
    timeout_seconds: PositiveSeconds = 30.0
    """Longest wait for one response."""
    headers: Headers = Field(default_factory=dict)
    """Headers of every request; they override those that Headrace sets. Write secrets as `${env:}` or `${file:}`."""
    tls: ClientTls = ClientTls()
    """Certificates, if the URL begins with `https`."""
    oauth: OAuth | None = None
    """Authorization server that issues tokens for the header `Authorization`."""
    mode: BackendMode = "results"
    """Content of a request, and meaning of its response. `results`: an array of records; the response has one result
    per record. `status`: the same array; 2xx means that all records succeeded. `single`: one record per request, its
    value as body. `cloudevents_structured`, `cloudevents_binary`: one record per request, as a CloudEvent 1.0. The
    response's body is read in mode `results` only."""
    answers: Literal["own", "dapr"] = "own"
    """`dapr`: the backend answers as an application of Dapr, with `SUCCESS`, `RETRY` or `DROP`. In the modes with an
    array, request and response are those of Dapr's bulk subscriptions."""
    health: BackendHealth | None = None
    """When set, consumption waits for the first 2xx from this path; until then readiness reports it."""
    offsets_path: Annotated[str, Field(pattern=r"^(/[!-\"$->@-\[\]-~]*)?$")] = ""
    """When set, the backend stores offsets with its own data. For each assigned partition Headrace sends a GET request
    with `group`, `topic`, `partition` and `epoch` to this path. The response is `{"offset": n}`, with null for none."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, url in (("url", self.url), ("oauth.token_url", self.oauth.token_url if self.oauth else "")):
            if why := forbidden_host(urlsplit(url).hostname or ""):
                raise ValueError(f"{name} is refused: {why}")
        if self.tls != ClientTls() and not self.secure:
            raise ValueError("tls is set, but url is not https: correct one of them")
        if self.oauth and any(name.lower() == "authorization" for name in self.headers):
            raise ValueError("has both oauth and a header Authorization: keep one")
        return self

    def refuses(self, url: str, address: str) -> str:
        """Return why the IP address that a URL resolves to must not be connected to; empty if it may be."""
        return forbidden_address(address)

    @property
    def secure(self) -> bool:
        """Whether any connection uses TLS."""
        return "https" in (urlsplit(url).scheme for url in (self.url, self.oauth.token_url if self.oauth else ""))


class RowsBackend(BackendConfig):
    """The HTTP endpoint that rows of a query are posted to."""

    internal: ClassVar = frozenset(("answers", "health", "offsets_path"))

"""How a backend is reached: TLS, tokens, and headers of every request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from headrace.config.section import Section, Url

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
FRAMING: Final = re.compile(
    "host|te|trailer|expect|upgrade|(proxy-)?connection|keep-alive|content-length|(transfer|accept)-encoding", re.I
)
"""Headers that say how a request is read; they are the client's own."""


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            raise ValueError(f"has the name {name!r}, which is no name of an HTTP header: correct it")
        if FRAMING.fullmatch(name):
            raise ValueError(f"has {name}, which Headrace sets itself: take it out")
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"has a value of {name} with other than printable ASCII characters: encode it")
    if len({name.lower() for name in headers}) < len(headers):
        raise ValueError("has a name twice, in two spellings: keep one")
    return headers


Headers = Annotated[dict[str, str], AfterValidator(_sendable)]


class BackendTls(Section):
    """TLS to a backend, 1.2 or newer; files are PEM, relative to this file, and read again when they change. The
    server's name and certificate are always checked."""

    ca: Path | None = None
    """Authorities that may have signed the backend's certificate, instead of the system's."""
    certificate: Path | None = None
    """Certificate that Headrace shows, with its chain."""
    key: Path | None = None
    """Private key of the certificate; nobody else may read the file."""
    key_password: SecretStr = SecretStr("")
    """Password of the key, if it has one."""

    @model_validator(mode="after")
    def _complete(self) -> BackendTls:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("needs certificate and key together: set both, or none")
        return self


def _secretly(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError("is not https, so that others could read the secret on its way: use https")
    return url


class OAuth(Section):
    """A token for every request, fetched with the credentials of a client (RFC 6749, 4.4)."""

    token_url: Annotated[Url, AfterValidator(_secretly)]
    """Where the token server gives tokens; `https`, or loopback."""
    client_id: Annotated[str, Field(min_length=1)]
    """Name of this client there."""
    client_secret: SecretStr
    """Its secret."""
    scope: str = ""
    """Scopes to ask for, with blanks between; empty for the server's default."""
    audience: str = ""
    """Whom the token is for, where the server wants to be told."""

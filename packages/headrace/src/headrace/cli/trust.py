"""Whose certificates commands trust at the HTTP API of Headrace, and what they say if no connection is made."""

import contextlib
import re
import ssl
from collections.abc import Iterable
from pathlib import Path

import click

from headrace.config.model import HeadraceConfig
from headrace.errors import EnvironmentProblem

_FIRST_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
START = "headrace run -c headrace.yaml"
"""The remedy for a Headrace that may not run."""
_OTHER_NAME = (62, 64)
"""Of OpenSSL's verify codes: the certificate is for another host or address."""


def certificates_of(settings: HeadraceConfig | None) -> list[Path]:
    """Return the certificates that the listeners of a file show."""
    listeners = [settings.http, settings.http.management] if settings else []
    return [one.tls.certificate for one in listeners if one and one.tls.certificate]


def trust(ca: Path | None, certificates: Iterable[Path] = ()) -> ssl.SSLContext:
    """Return TLS that trusts an authority; or only these certificates, whatever host they name; or the system's.

    Raises:
        click.UsageError: The file of the authority has no certificates.
    """
    if ca:
        try:
            return ssl.create_default_context(cafile=ca)
        except ssl.SSLError:
            raise click.UsageError(f"--ca {ca} has no certificates in PEM") from None
    pinned = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the system's authorities: it checks no host name
    pinned.check_hostname = False
    pinned.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    has_own = False
    for file in certificates:
        with contextlib.suppress(OSError, ValueError):  # a file of another user: the system's authorities decide
            # The first alone: others are of authorities, which sign certificates of other servers too.
            first = _FIRST_CERTIFICATE.search(file.read_text())
            pinned.load_verify_locations(cadata=first[0] if first else "")
            has_own = True
    return pinned if has_own else ssl.create_default_context()


def unreachable(base: str, cause: BaseException, limit_seconds: float) -> EnvironmentProblem:
    """Return the error of a request without a response, with its cause and what helps; `remedy` is a command."""
    why, remedy = getattr(cause, "reason", cause), START
    start = f"start it ({START}), or pass its address with --url or HEADRACE_URL"
    text = f"Headrace is unreachable at {base} ({getattr(why, 'strerror', None) or why}): {start}"
    if isinstance(why, ssl.SSLCertVerificationError):
        remedy = "headrace status --ca FILE"
        text = f"The certificate of {base} is not trusted ({why.verify_message.rstrip('.')}): "
        if why.verify_code in _OTHER_NAME:
            text += "pass an address with a name of the certificate, with --url or HEADRACE_URL"
        else:
            text += "name the file of its authority with --ca FILE or SSL_CERT_FILE, or its headrace.yaml with -c"
    elif isinstance(why, ssl.SSLError):
        remedy = "headrace status --url URL"
        text = f"No TLS connection to {base} ({why.reason or why}): if it is plain HTTP, pass http://... with --url"
    elif isinstance(why, TimeoutError):
        text = f"Headrace at {base} did not respond within {limit_seconds:g} s: look at its log, or {start}"
    return EnvironmentProblem(text, remedy=remedy)

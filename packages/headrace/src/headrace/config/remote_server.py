"""Servers that are called with a user and a password: the schema registry, ksqlDB."""

import base64
from typing import ClassVar, Self

from pydantic import SecretStr, model_validator

from headrace.config.backend import ClientTls, connection_problem, is_protected
from headrace.config.section import PositiveSeconds, Section, Url


class RemoteServer(Section):
    """How to reach a server."""

    section: ClassVar[str]
    """Name of the section in the file, for sentences."""
    internal: ClassVar = frozenset(("timeout_seconds",))

    url: Url
    """Base URL; it may have a path."""
    username: str = ""
    """User of HTTP basic authentication; empty for none."""
    password: SecretStr = SecretStr("")
    """Password of HTTP basic authentication."""
    tls: ClientTls = ClientTls()
    """Certificates, if the URL begins with `https`."""
    timeout_seconds: PositiveSeconds = 5.0
    """Longest wait for one response."""

    @model_validator(mode="after")
    def _transport_fits(self) -> Self:
        if self.tls != type(self.tls)() and not self.secure:
            raise ValueError("tls is set, but url is not https: correct one of them")
        return self

    @property
    def warnings(self) -> list[str]:
        """Secrets that the network could read, a sentence each."""
        if not self.username or is_protected(self.url):
            return []
        return [f"{self.section}.url is not https, so the network can read the password: use https"]

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        return self.url.lower().startswith("https:")

    def login(self) -> dict[str, str]:
        """Return the headers of a request that prove who sends it."""
        if not self.username:
            return {}
        pair = f"{self.username}:{self.password.get_secret_value()}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}

    def login_advice(self, status: int, right: str) -> str:
        """Return what to do after HTTP 401 or 403; `right` is that of the user: `to read schemas`."""
        if status == 403:
            return f"Give user {self.username or '(none)'} the right {right} there"
        return f"{'Correct' if self.username else 'Set'} {self.section}.username and password"

    def problem(self, cause: Exception) -> str:
        """Return why a request failed without a response, and the next step."""
        reason = getattr(cause, "certificate_error", None) or getattr(cause, "os_error", None) or cause.__cause__
        if isinstance(reason, OSError):
            return connection_problem(reason, f"{self.section}.")
        # With TLS 1.3 the client is connected before the server looks at its certificate.
        hint = f" (if it requires a certificate, set {self.section}.tls.certificate and key)"
        may_help = self.secure and not self.tls.certificate and "certificate" not in self.tls.internal
        return (str(cause) or "no response") + (hint if may_help else "")

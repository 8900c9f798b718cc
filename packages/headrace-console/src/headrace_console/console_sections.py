"""The key that the console adds to `headrace.yaml`."""

from typing import ClassVar, Self

from pydantic import model_validator

from headrace.config.model import HeadraceConfig
from headrace.config.section import Port, Section


class ConsoleConfig(Section):
    """The web console, which `headrace run` starts with itself. TLS and host names are those of `http`. It needs the
    extra `console`."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback needs `http.tls` and authentication."""
    port: Port = 8090
    """Port to listen on; 0 picks a free one, which the log names."""


class ConsoleSections(HeadraceConfig):
    """The file with the key of the console."""

    first_process: ClassVar = frozenset(("console",))

    console: ConsoleConfig | None = None
    """When set, the web console is served, too."""

    @model_validator(mode="after")
    def _check_console(self) -> Self:
        mode, tls = self.security.mode, self.http.tls
        if self.console and (mode == "mtls" or tls.client_ca):
            raise ValueError("console: browsers log in with tokens, and http asks for client certificates: remove it")
        host = self.console.host if self.console else "127.0.0.1"
        if host not in ("127.0.0.1", "localhost", "::1") and (mode == "none" or not tls.certificate):
            raise ValueError(
                f"console.host is {host}, but TLS and authentication are not both on: set http.tls and security.mode, "
                "or listen on 127.0.0.1"
            )
        return self

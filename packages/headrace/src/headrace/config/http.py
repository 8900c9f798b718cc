"""The HTTP listener, and who may call."""

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, model_validator

from headrace.config.section import Count, Number, Port, Section, Url

BODY_LIMIT: Final = "http.max_body_bytes (maxRequestBodySize of a function)"
"""The settings of the largest request body."""


class PrincipalConfig(Section):
    """A caller in the modes `token` and `mtls`."""

    token: SecretStr = SecretStr("")
    """In mode `token`: the token that the principal sends as `Authorization: Bearer ...`; at least 16 characters."""
    scopes: list[Annotated[str, Field(pattern=r"^[\x21-\x7e]+$")]] = Field(default=[])
    """Scopes of the principal: `kafka:r`, `kafka:w`, `admin`, `metrics`, or patterns such as `produce:orders.*`."""


class JwtConfig(Section):
    """Which tokens of an OAuth 2.0 server are accepted (RS256, ES256, EdDSA)."""

    leeway_seconds: ClassVar[float] = 60.0
    """Allowed difference between the clocks of that server and of Headrace."""
    max_lifetime_seconds: ClassVar[float] = 86_400.0
    """Tokens with a longer lifetime are rejected."""
    refresh_seconds: ClassVar[float] = 300.0
    """Pause between requests for keys; an unknown key is requested at once, at most every 30 seconds."""

    issuer: str = ""
    """Required value of the claim `iss`."""
    audience: str = ""
    """Required value of the claim `aud`, alone or in a list."""
    jwks_url: Url | None = None
    """URL of the server's public keys."""
    jwks_file: Path | None = None
    """File of the same keys, instead of `jwks_url`; relative to this file."""


class SecurityConfig(Section):
    """Who may do what over HTTP."""

    mode: Literal["none", "token", "jwt", "mtls"] = "none"
    """How callers authenticate. `none`: not at all; every caller on loopback may do everything. `token`: fixed tokens.
    `jwt`: tokens of an OAuth 2.0 server. `mtls`: client certificates."""
    principals: dict[Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,200}$")], PrincipalConfig] = Field(
        default_factory=dict
    )
    """Principals by name. In mode `mtls` the name is the DNS name, URI or common name of a client certificate."""
    jwt: JwtConfig = JwtConfig()
    """Tokens of mode `jwt`."""
    requests_per_second: Annotated[float, Field(ge=0), Number] = 0.0
    """Most requests per second of one principal; above it, they are answered 429. 0: no limit."""
    max_in_flight: Count = 64
    """Most requests of one principal in progress; one more is answered 429."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        jwt = self.jwt
        if self.mode == "jwt" and not (jwt.issuer and jwt.audience and bool(jwt.jwks_url) != bool(jwt.jwks_file)):
            raise ValueError("mode is jwt: set jwt.issuer, jwt.audience, and one of jwt.jwks_url and jwt.jwks_file")
        if self.mode in ("token", "mtls") and not self.principals:
            raise ValueError(f"mode is {self.mode}, but principals is empty, so every request would fail: add one")
        tokens = [principal.token.get_secret_value() for principal in self.principals.values()]
        if self.mode == "token" and (min(map(len, tokens)) < 16 or len(set(tokens)) < len(tokens)):
            raise ValueError("mode is token: every principal needs a different token of at least 16 characters")
        return self


class TlsConfig(Section):
    """TLS of the listener, 1.2 or newer. Files are PEM, with paths relative to this file, and are reloaded when they
    change."""

    certificate: Path | None = None
    """Server certificate with its chain; with it, Headrace accepts HTTPS only."""
    key: Path | None = None
    """Private key of the certificate; no other user may read the file."""
    client_ca: Path | None = None
    """Authorities whose client certificates are accepted; with it, every client needs a certificate."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.certificate is None) != (self.key is None) or (self.client_ca and not self.certificate):
            raise ValueError("needs certificate and key together: set both, or neither of them and no client_ca")
        return self


class ManagementConfig(Section):
    """A listener of its own for administration and metrics. The other one then answers them 404. Limits and host names
    are those of `http`."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback needs TLS here and authentication."""
    port: Port = 8083
    """Port to listen on; 0 picks a free one, which the `ready` line names."""
    tls: TlsConfig = TlsConfig()
    """HTTPS instead of HTTP."""


class HttpConfig(Section):
    """The HTTP listener."""

    max_records: ClassVar[int] = 10_000
    """Most records of one produce request; more are answered 413. Also the limit of records in flight of a stream."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback needs TLS and authentication."""
    port: Port = 8082
    """Port to listen on; 0 picks a free one, which the `ready` line names."""
    tls: TlsConfig = TlsConfig()
    """HTTPS instead of HTTP."""
    management: ManagementConfig | None = None
    """When set, administration and metrics have a listener of their own."""
    allowed_hosts: list[str] = Field(default=[])
    """Host names, without port, that clients may use in addition to `localhost`, `127.0.0.1`, `::1` and `host`."""
    max_body_bytes: Count = 1_048_576
    """Largest request body; a larger one is answered 413 and not read to its end. Also the longest line of a stream."""
    max_connections: Count = 1000
    """Most connections; a request on one more is answered 503. Readers of active consumers have half as many in
    addition, so waiting readers and other clients cannot shut each other out. Health requests are always answered."""

    access_log: bool = False
    """Whether each request is logged by `headrace.access` at level `info`, except those of health and metrics. Values
    of the query, headers and bodies are never logged."""

    @model_validator(mode="after")
    def _two_addresses(self) -> Self:
        other = self.management
        if other and other.port and (self.host, self.port) == (other.host, other.port):
            raise ValueError(f"management has the port of http, {self.port}: change one of them")
        return self

    @property
    def max_readers(self) -> int:
        """Most connections that may read active consumers."""
        return max(1, self.max_connections // 2)

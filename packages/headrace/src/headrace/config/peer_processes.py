"""The processes of one deployment that forward requests to each other."""

from typing import Annotated, ClassVar, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from headrace.config.backend import ClientTls, is_protected
from headrace.config.section import Section, Url

_LEAST_SECRET: Final = 32


def _process_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("has a path or query: write scheme, host and port only")
    if not is_protected(url):
        raise ValueError("is not https, so the network could read records: use https")
    return url.rstrip("/")


ProcessUrl = Annotated[Url, AfterValidator(_process_url)]


class ClusterConfig(Section):
    """Several processes behind one address. Each forwards requests for an instance to the process that owns it."""

    max_forwarded: ClassVar[int] = 256
    """Most requests that are forwarded to one process at the same time; one more is answered 503."""

    peers: Annotated[list[ProcessUrl], Field(max_length=64)] = Field(default=[])
    """URLs of the processes, such as `https://localhost:8083`; `url` may be one of them. Empty: no forwarding."""
    url: ProcessUrl | None = None
    """URL at which the others reach this process, and no other one."""
    secret: SecretStr = SecretStr("")
    """Secret that signs forwarded requests, the same in all processes; at least 32 characters. Write it as
    `${env:NAME}` or `${file:PATH}`."""
    tls: ClientTls = ClientTls()
    """TLS to the other processes; they need `certificate` and `key` if their `http.tls.client_ca` is set."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.peers:
            return self
        if self.url is None:
            raise ValueError("peers are set, but url is not: set the URL at which they reach this process")
        if len(self.secret.get_secret_value()) < _LEAST_SECRET:
            raise ValueError(
                f"peers are set, but secret has fewer than {_LEAST_SECRET} characters: set a random one, "
                "the same in every process"
            )
        return self

"""The settings of registrations: the allowed backends and the limits of a team.

A URL has one accepted spelling. A URL that two parsers could read differently is rejected (RFC 3986, section 7).
"""

import re
from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from headrace.config.backend import BackendConfig, ClientTls, forbidden_address, forbidden_host, is_this_machine
from headrace.config.consumers import DeadLetterConfig, ReactiveConsumerConfig
from headrace.config.section import Count, Section, TopicName, TopicPattern, Url

_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PATH: Final = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~!$&'()*+,=:@-]+)*/?")
_PORTS: Final = {"http": 80, "https": 443}
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_MAX_RETRY_TOPICS: Final = 3
_MEMBER: Final = {"fetch.max.bytes": 52_428_800, "max.partition.fetch.bytes": 52_428_800, "session.timeout.ms": 60_000}
"""Upper limits of the consumer's properties."""


class _UrlParts(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


def _parse(url: str) -> _UrlParts:
    """Return the parts of a URL; a spelling that two parsers could read differently is a ValueError."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    spelt = (f"[{host}]" if ":" in host else host) + ("" if parts.port is None else f":{parts.port}")
    if parts.netloc.lower() != spelt or not _is_plain(host.removeprefix("*.")):
        raise ValueError(
            f"has the host {parts.netloc[:100]}: write a name of letters, digits and hyphens, without a final dot, "
            "or an IP address in its usual spelling"
        )
    if "#" in url or not _PATH.fullmatch(parts.path):
        raise ValueError(
            f"has the path {parts.path[:100]}: write it without %, ;, #, and without empty or dotted parts"
        )
    return _UrlParts(parts.scheme, host, parts.port or _PORTS[parts.scheme], parts.path)


def _is_plain(host: str) -> bool:
    if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):
        try:
            return str(ip_address(host)) == host
        except ValueError:
            return False
    return len(host) <= 253 and _NAME.fullmatch(host) is not None


def _usable(pattern: str) -> str:
    parts = _parse(pattern)
    if urlsplit(pattern).query or "?" in pattern:
        raise ValueError("has a query: write scheme, host, port and the start of the path")
    why = forbidden_host(parts.host)
    if why:
        raise ValueError(f"is refused: {why}")
    base = parts.host.removeprefix("*.")
    if base != parts.host and ("." not in base or not _NAME.fullmatch(base) or _NUMBER.fullmatch(base.split(".")[-1])):
        raise ValueError("covers hosts of many owners: write *. and a domain of two or more parts, *.example.com")
    return pattern


def plain_url(url: str) -> str:
    """Return a URL that every parser reads in the same way, without query, and not of a metadata service."""
    if "*" in url:
        raise ValueError("has *: write the host in full")
    return _usable(url)


def refused_address(url: str, address: str) -> str:
    """Return why the IP address of a URL must not be connected to; this machine needs a URL that names it."""
    why = forbidden_address(address)
    if not why and is_this_machine(address) and urlsplit(url).hostname not in _LOOPBACK:
        return f"{address} is this machine, which must be named as localhost"
    return why


def _covers(pattern: _UrlParts, url: _UrlParts) -> bool:
    host, prefix = pattern.host, pattern.path.rstrip("/")
    return (
        (pattern.scheme, pattern.port) == (url.scheme, url.port)
        and (url.host.endswith(host[1:]) if host.startswith("*.") else url.host == host)
        and (f"{url.path}/".startswith(f"{prefix}/") and (url.path != prefix or not pattern.path.endswith("/")))
    )


class RegistrationsConfig(Section):
    """Reactive consumers that teams register over HTTP, in addition to those of this file; off without `backends`."""

    internal: ClassVar = frozenset(("max_per_owner",))

    backends: list[Annotated[Url, AfterValidator(_usable)]] = []
    """Allowed URLs of registered backends: scheme, host, port, and the first parts of the path. The host may be
    `*.example.com`, for any name below it; `localhost` and IP addresses are written in full. Link-local and metadata
    addresses are never allowed, and neither are other names of this machine."""
    max_per_owner: Count = 20
    """Most registrations of one owner, including those that are not enabled."""
    max_in_all: Annotated[Count, Field(le=4000)] = 100
    """Most registrations of all owners together."""

    def refusal(self, url: str) -> str:
        """Return why a registered backend must not have a URL; empty if it may."""
        try:
            parts = _parse(url)
        except ValueError as cause:
            return str(cause)
        if any(_covers(_parse(pattern), parts) for pattern in self.backends):
            return ""
        shown, allowed = url.partition("?")[0], ", ".join(self.backends)
        return f"is {shown}, which is not allowed here (allowed: {allowed}): use another, or contact the operator"


class RegisteredBackend(BackendConfig):
    """A backend of a registration; its URLs, and the addresses its host resolves to, must be allowed."""

    @model_validator(mode="after")
    def _on_the_list(self, info: ValidationInfo) -> Self:
        settings: RegistrationsConfig = info.context["registrations"]  # type: ignore[index]  # never read without
        own = urlsplit(self.url)
        paths = {"health.path": self.health.path if self.health else "", "offsets_path": self.offsets_path}
        urls = {name: f"{own.scheme}://{own.netloc}{path}" for name, path in paths.items() if path}
        if self.oauth:
            urls["oauth.token_url"] = self.oauth.token_url
        for name, url in {"url": self.url, **urls}.items():
            if why := settings.refusal(url):
                raise ValueError(f"{name} {why}")
        if self.tls != ClientTls():
            raise ValueError("tls names files of Headrace's machine, which registrations must not use: remove it")
        return self

    def refuses(self, url: str, address: str) -> str:
        return refused_address(url, address)


class RegistrationConfig(ReactiveConsumerConfig):
    """A reactive consumer as a team registers it, without the settings that concern the machine or other teams."""

    topics: Annotated[list[TopicName], Field(max_length=500)] = []
    """Topics to consume."""
    topic_patterns: Annotated[list[TopicPattern], Field(max_length=20)] = []
    """Patterns of topics to consume."""
    enabled: bool = True
    """Whether it runs. When false, the registration stays, and so do its group and offsets."""
    backend: RegisteredBackend
    """Where records are delivered."""

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        properties: Any = self.consumer.properties
        for name, value, bound in (
            ("max_in_flight", self.max_in_flight, 64),
            ("batch.max_records", self.batch.max_records, 1000),
            ("batch.max_bytes", self.batch.max_bytes, 1_048_576),
            ("flow.max_records", self.flow.max_records, 20_000),
            ("flow.max_bytes", self.flow.max_bytes, 33_554_432),
            *((f"consumer.properties.{name}", properties.get(name, 0), bound) for name, bound in _MEMBER.items()),
            ("backend.timeout_seconds", self.backend.timeout_seconds, 60),
        ):
            if value > bound:
                raise ValueError(f"{name} is {value}; the limit for registrations is {bound}: lower it")
        if len(self.retry.topics) > _MAX_RETRY_TOPICS:
            raise ValueError(
                f"retry.topics has {len(self.retry.topics)} delays; the limit for registrations is {_MAX_RETRY_TOPICS}"
            )
        if "group.instance.id" in properties:
            raise ValueError(
                "consumer.properties has group.instance.id, so every process would be that member: remove it"
            )
        if self.dead_letter.topic != DeadLetterConfig().topic:
            raise ValueError("dead_letter.topic is fixed for registrations (the topic's name and .dlq): remove it")
        return self

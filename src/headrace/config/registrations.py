"""Registrations: reactive consumers that teams bring over HTTP, and what the operator lets them do.

The list of backends is held against one spelling of each URL; whatever another reader could take for another place is
refused rather than read. Source: reliability.md 4.4 and row S4; RFC 3986, section 7.
"""

from __future__ import annotations

import functools
import re
from ipaddress import ip_address
from typing import Annotated, Final, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from headrace.config.backend import BackendConfig, BackendTls, forbidden_host, is_this_machine
from headrace.config.consumers import DeadLetterConfig, ReactiveConsumerConfig
from headrace.config.section import Count, PositiveSeconds, Section, TopicName, TopicPattern, Url

_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PATH: Final = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~!$&'()*+,=:@-]+)*/?")
_PORTS: Final = {"http": 80, "https": 443}
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class _Place(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


def _place_of(url: str) -> _Place:
    """Return what a URL names.

    Raises:
        ValueError: It is spelt in a way that two readers could understand differently.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    spelt = (f"[{host}]" if ":" in host else host) + ("" if parts.port is None else f":{parts.port}")
    if parts.netloc.lower() != spelt or not _is_plain(host.removeprefix("*.")):
        raise ValueError(
            f"has the host {parts.netloc[:100]}: write a name of letters, digits and hyphens without a dot behind it, "
            "or an IP address in its usual spelling"
        )
    if "#" in url or not _PATH.fullmatch(parts.path):
        raise ValueError(
            f"has the path {parts.path[:100]}: write it without %, ;, #, and without empty or dotted parts"
        )
    return _Place(parts.scheme, host, parts.port or _PORTS[parts.scheme], parts.path)


def _is_plain(host: str) -> bool:
    if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):
        try:
            return str(ip_address(host)) == host
        except ValueError:
            return False
    return len(host) <= 253 and _NAME.fullmatch(host) is not None


def _usable(pattern: str) -> str:
    place = _place_of(pattern)
    if urlsplit(pattern).query or "?" in pattern:
        raise ValueError("has a query: write scheme, host, port and the path that URLs begin with")
    if why := forbidden_host(place.host):
        raise ValueError(f"is refused: {why}")
    base = place.host.removeprefix("*.")
    if base != place.host and ("." not in base or not _NAME.fullmatch(base) or _NUMBER.fullmatch(base.split(".")[-1])):
        raise ValueError("stands for hosts of many owners: write *. and a domain of two parts or more, *.example.com")
    return pattern


def _covers(pattern: _Place, place: _Place) -> bool:
    host, prefix = pattern.host, pattern.path.rstrip("/")
    return (
        (pattern.scheme, pattern.port) == (place.scheme, place.port)
        and (place.host.endswith(host[1:]) if host.startswith("*.") else place.host == host)
        and (f"{place.path}/".startswith(f"{prefix}/") and (place.path != prefix or not pattern.path.endswith("/")))
    )


class RegistrationLimits(Section):
    """What one registered consumer may ask for at most."""

    max_in_flight: Count = 64
    """Its `max_in_flight`."""
    batch_records: Count = 1000
    """Its `batch.max_records`."""
    batch_bytes: Count = 1_048_576
    """Its `batch.max_bytes`."""
    flow_records: Count = 20_000
    """Its `flow.max_records`."""
    flow_bytes: Count = 33_554_432
    """Its `flow.max_bytes`."""
    fetch_bytes: Count = 52_428_800
    """Its `consumer.fetch_max_bytes` and `consumer.partition_fetch_bytes`."""
    answer_bytes: Count = 33_554_432
    """Its `backend.max_answer_bytes`."""
    timeout_seconds: PositiveSeconds = 60.0
    """Its `backend.timeout_seconds`."""
    session_seconds: PositiveSeconds = 60.0
    """Its `consumer.session_timeout_seconds`."""
    tiers: Count = 3
    """Delays in its `retry.tiers`; each is a topic."""
    body_bytes: Count = 65_536
    """Its settings as JSON."""


class RegistrationsConfig(Section):
    """Reactive consumers that teams register over HTTP, besides those of this file; off without `backends`."""

    backends: list[Annotated[Url, AfterValidator(_usable)]] = []
    """URLs that registered backends may have: scheme, host, port, and what the path begins with, part by part. The
    host may be `*.example.com`, for any name below it; `localhost` and IP addresses are written out. Link-local and
    metadata addresses are never allowed, nor is another name that stands for this machine."""
    max_per_owner: Count = 20
    """Registrations of one owner, those that are not enabled included."""
    max_in_all: Count = 100
    """Registrations of all owners together."""
    limits: RegistrationLimits = RegistrationLimits()
    """What one of them may ask for."""

    def refusal(self, url: str) -> str:
        """Return why a registered backend must not have a URL, in words; empty when it may."""
        try:
            place = _place_of(url)
        except ValueError as cause:
            return str(cause)
        if any(_covers(_place_of(pattern), place) for pattern in self.backends):
            return ""
        shown, allowed = url.partition("?")[0], ", ".join(self.backends)
        return f"is {shown}, which is not allowed here (allowed: {allowed}): choose another, or ask the operator"


class RegisteredBackend(BackendConfig):
    """A backend that a team named; every URL of it is held against the list, and every address it turns out to have."""

    @model_validator(mode="after")
    def _on_the_list(self, info: ValidationInfo) -> RegisteredBackend:
        settings: RegistrationsConfig = info.context["registrations"]  # type: ignore[index]  # never read without
        place = urlsplit(self.url)
        paths = {"health.path": self.health.path if self.health else "", "offsets_path": self.offsets_path}
        urls = {name: f"{place.scheme}://{place.netloc}{path}" for name, path in paths.items() if path}
        if self.oauth:
            urls["oauth.token_url"] = self.oauth.token_url
        for name, url in {"url": self.url, **urls}.items():
            if why := settings.refusal(url):
                raise ValueError(f"{name} {why}")
        if self.allow_link_local:
            raise ValueError("allow_link_local is not for registrations: take it out")
        if self.tls != BackendTls():
            raise ValueError("tls names files of the machine Headrace runs on, which is not for registrations")
        return self

    def refuses(self, url: str, address: str) -> str:
        """Return why an address must not be connected to; one of this machine only if the URL says so itself."""
        why = super().refuses(url, address)
        if not why and is_this_machine(address) and urlsplit(url).hostname not in _LOOPBACK:
            return f"{address} is this machine's own, which registered backends name as localhost"
        return why


class RegistrationConfig(ReactiveConsumerConfig):
    """A reactive consumer as a team registers it: the settings of the file, without those that reach further."""

    topics: Annotated[list[TopicName], Field(max_length=500)] = []
    """Topics to consume."""
    topic_patterns: Annotated[list[TopicPattern], Field(max_length=20)] = []
    """Patterns of topics to consume."""
    enabled: bool = True
    """Whether it runs; without it the registration is kept, and its group with its offsets."""
    backend: RegisteredBackend
    """Where records are delivered."""

    @model_validator(mode="after")
    def _within_limits(self, info: ValidationInfo) -> RegistrationConfig:
        settings: RegistrationsConfig = info.context["registrations"]  # type: ignore[index]  # never read without
        limits = settings.limits
        for name, bound in {
            "max_in_flight": limits.max_in_flight,
            "batch.max_records": limits.batch_records,
            "batch.max_bytes": limits.batch_bytes,
            "flow.max_records": limits.flow_records,
            "flow.max_bytes": limits.flow_bytes,
            "consumer.fetch_max_bytes": limits.fetch_bytes,
            "consumer.partition_fetch_bytes": limits.fetch_bytes,
            "consumer.session_timeout_seconds": limits.session_seconds,
            "backend.max_answer_bytes": limits.answer_bytes,
            "backend.timeout_seconds": limits.timeout_seconds,
        }.items():
            value = functools.reduce(getattr, name.split("."), self)
            if value > bound:  # type: ignore[operator]  # all of them are numbers
                raise ValueError(f"{name} is {value}, and registrations may have {bound} here: lower it")
        if len(self.retry.tiers) > limits.tiers:
            raise ValueError(
                f"retry.tiers has {len(self.retry.tiers)} delays, and registrations may have {limits.tiers}"
            )
        if self.consumer.instance_id:
            raise ValueError("consumer.instance_id is set, and every process of Headrace would be it: take it out")
        if self.dead_letter.topic != DeadLetterConfig().topic:
            raise ValueError("dead_letter.topic is not for registrations: letters go to the topic's name and .dlq")
        return self

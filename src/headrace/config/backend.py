"""Backends: where reactive consumers deliver, and how."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from headrace.config.addresses import forbidden_address, forbidden_host
from headrace.config.section import Count, PositiveSeconds, Section, Url
from headrace.config.transport import BackendTls, Headers, OAuth

BackendMode = Literal[
    "results", "status", "single", "cloudevents_batch", "cloudevents_structured", "cloudevents_binary"
]
ONE_RECORD_MODES = ("single", "cloudevents_structured", "cloudevents_binary")
"""Modes with one record per request."""


class BackendHealth(Section):
    """What must answer before the first record is consumed."""

    path: Annotated[str, Field(pattern=r"^/[!-\[\]-~]*$")]
    """Path (and query) that is asked with GET on the backend's host; any 2xx means that it is ready."""
    interval_seconds: PositiveSeconds = 1.0
    """Pause between two questions."""


class BackendConfig(Section):
    """The HTTP endpoint a reactive consumer delivers to."""

    url: Url
    """Where records are posted."""
    allow_link_local: bool = False
    """Whether the backend may have a link-local address or one of a cloud's metadata service."""
    timeout_seconds: PositiveSeconds = 30.0
    """Longest wait for one answer."""
    headers: Headers = Field(default_factory=dict)
    """Headers of every request, which win over those that Headrace would set; secrets as `${env:}` or `${file:}`."""
    tls: BackendTls = BackendTls()
    """Certificates, where the URL begins with `https`."""
    oauth: OAuth | None = None
    """Where tokens for `Authorization` come from."""
    mode: BackendMode = "results"
    """What a request holds, and what its answer says. `results`: an array of records, answered by one result per
    record; `status`: the same array, and 2xx means all are done; `single`: one record per request, its value as body;
    `cloudevents_batch`, `cloudevents_structured`, `cloudevents_binary`: CloudEvents 1.0, the last two with one record
    per request. In all but `results` the answer's body is not read."""
    max_answer_bytes: Count = 1_048_576
    """Largest answer that is read. In mode `results`, where answers may echo the records, the default is four times
    `batch.max_bytes` and 16 KiB per record of `batch.max_records` more."""
    health: BackendHealth | None = None
    """When set, consumption begins with the first 2xx of this path, and readiness says so until then."""
    offsets_path: Annotated[str, Field(pattern=r"^(/[!-\"$->@-\[\]-~]*)?$")] = ""
    """When set, the backend keeps offsets with its own data: asked with GET on its host where each partition goes on
    when it is assigned, with `group`, `topic`, `partition` and `epoch`; answers `{"offset": n}`, null for none."""

    @model_validator(mode="after")
    def _elsewhere(self) -> BackendConfig:
        for name, url in (("url", self.url), ("oauth.token_url", self.oauth.token_url if self.oauth else "")):
            why = "" if self.allow_link_local else forbidden_host(urlsplit(url).hostname or "")
            if why:
                raise ValueError(f"{name} is refused: {why}; if that is meant, set allow_link_local: true")
        return self

    @model_validator(mode="after")
    def _transport_fits(self) -> BackendConfig:
        if self.tls != BackendTls() and not self.secure:
            raise ValueError("tls is set and url is not https: correct one of them")
        if self.oauth and any(name.lower() == "authorization" for name in self.headers):
            raise ValueError("has both oauth and a header Authorization: keep one")
        return self

    def refuses(self, url: str, address: str) -> str:
        """Return why an IP address that a URL turns out to have must not be connected to; empty when it may be."""
        return "" if self.allow_link_local else forbidden_address(address)

    @property
    def secure(self) -> bool:
        """Whether any connection uses TLS."""
        return "https" in (urlsplit(url).scheme for url in (self.url, self.oauth.token_url if self.oauth else ""))

"""Health for programs that watch this process, and the dangerous parts of its administration."""

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, model_validator

from headrace.config.backend import forbidden_host
from headrace.config.registrations import plain_url
from headrace.config.section import PositiveSeconds, Section, Url


class HealthConfig(Section):
    """What health requests report, apart from the services of this process."""

    enabled: bool = True
    """Whether `/health/{serviceId}` responds. Liveness and readiness always do."""
    use_json: bool = False
    """Whether `/health/{serviceId}` responds with JSON, `{"result": "OK"}`, instead of text."""
    timeout_seconds: PositiveSeconds = 2.0
    """Longest wait for the response of the backend at `downstream_url`."""
    downstream_url: Url | None = None
    """When set, readiness requires that the backend responds to a GET request of this URL with 2xx. Liveness does not
    depend on it."""

    @model_validator(mode="after")
    def _may_be_called(self) -> Self:
        if why := forbidden_host(urlsplit(self.downstream_url or "").hostname or ""):
            raise ValueError(f"downstream_url is refused: {why}")
        return self


class AdminConfig(Section):
    """Administration of this process over HTTP; it always requires the scope `admin`."""

    pass_through: list[Annotated[Url, AfterValidator(plain_url)]] = []
    """Base URLs of backends whose administration `X-Adm-PassThrough` reaches; without any, such requests are refused.
    The caller's credentials are not sent on."""

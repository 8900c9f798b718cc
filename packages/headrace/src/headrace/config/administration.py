"""Health for programs that watch this process."""

from typing import Self
from urllib.parse import urlsplit

from pydantic import model_validator

from headrace.config.backend import forbidden_host
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

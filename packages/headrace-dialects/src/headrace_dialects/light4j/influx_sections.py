"""The section of the InfluxDB that gets the metrics."""

from typing import Annotated, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from headrace.config.backend import forbidden_host, is_protected
from headrace.config.section import Number, Section, Url


class InfluxDbConfig(Section):
    """An InfluxDB that gets every metric by line protocol."""

    section: ClassVar[str] = "metrics.influxdb"
    """Name of the section in the file, for sentences."""

    url: Url
    """The whole write URL: `http://localhost:8086/write?db=metrics` of version 1, or
    `http://localhost:8086/api/v2/write?org=o&bucket=b` of version 2."""
    token: SecretStr = SecretStr("")
    """API token; for version 1 `user:password`. Empty for none."""
    interval_seconds: Annotated[float, Field(ge=1), Number] = 60.0
    """Time between two pushes."""

    @model_validator(mode="after")
    def _may_be_called(self) -> Self:
        if why := forbidden_host(urlsplit(self.url).hostname or ""):
            raise ValueError(f"url is refused: {why}")
        if "/write" not in urlsplit(self.url).path:
            raise ValueError("url should be a write URL, such as http://localhost:8086/write?db=metrics")
        return self

    @property
    def warnings(self) -> list[str]:
        """Secrets that the network could read, a sentence each."""
        if not self.token.get_secret_value() or is_protected(self.url):
            return []
        return [f"{self.section}.url is not https, so the network can read the token: use https"]


class MetricsConfig(Section):
    """Pushes of metrics. `GET /metrics` always has them too."""

    influxdb: InfluxDbConfig | None = None
    """An InfluxDB; none by default."""

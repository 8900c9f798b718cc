"""The keys that the endpoints of light-4j add to `headrace.yaml`."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from headrace.config.model import HeadraceConfig
from headrace.config.registrations import plain_url
from headrace.config.section import Section, Url
from headrace_dialects.light4j.influx_sections import MetricsConfig


class AdminConfig(Section):
    """Administration of this process over HTTP; it always requires the scope `admin`."""

    pass_through: list[Annotated[Url, AfterValidator(plain_url)]] = []
    """Base URLs of backends whose administration `X-Adm-PassThrough` reaches; without any, such requests are refused.
    The caller's credentials are not sent on."""

    chaos: Literal["none", "loopback", "anywhere"] = "none"
    """Callers that may start assaults (`POST /adm/chaosmonkey/{assault}`). `none`: no caller. `loopback`: callers on
    this machine. `anywhere`: every caller."""


class LightSections(HeadraceConfig):
    """The file with these keys."""

    admin: AdminConfig = AdminConfig()
    """Administration of this process."""
    metrics: MetricsConfig = MetricsConfig()
    """Pushes of metrics."""

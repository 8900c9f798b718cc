"""The keys that the endpoints of light-4j add to `headrace.yaml`."""

from typing import Literal

from headrace.config.administration import AdminConfig
from headrace.config.model import HeadraceConfig
from headrace_dialects.light4j.influx_sections import MetricsConfig


class ChaosConfig(AdminConfig):
    """Administration, with the assaults of light-4j's chaos monkey."""

    chaos: Literal["none", "loopback", "anywhere"] = "none"
    """Callers that may start assaults (`POST /adm/chaosmonkey/{assault}`). `none`: no caller. `loopback`: callers on
    this machine. `anywhere`: every caller."""


class LightSections(HeadraceConfig):
    """The file with these keys."""

    admin: ChaosConfig = ChaosConfig()
    """Administration of this process."""
    metrics: MetricsConfig = MetricsConfig()
    """Pushes of metrics."""

"""The keys that applications of Dapr add to `headrace.yaml`."""

from headrace.config.model import HeadraceConfig
from headrace.config.section import Section


class DaprConfig(Section):
    """Requests of Dapr applications."""

    pubsubs: list[str] = []
    """Names of Dapr's pubsub components to which applications publish; all of them mean `kafka`. Without any,
    `/v1.0/publish` is refused."""


class DaprSections(HeadraceConfig):
    """The file with these keys."""

    dapr: DaprConfig = DaprConfig()
    """Requests of Dapr applications."""

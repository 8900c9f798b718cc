"""The administration of a process, for tests that need no process."""

from typing import Any

from headrace.admin.process.modules import Modules
from headrace.admin.process.routes import AdministrationEndpoints
from headrace.config.known_secrets import SecretMask
from headrace.config.model import HeadraceConfig
from headrace.runtime import SystemClock
from headrace.runtime.feature_parts import Reload
from headrace.runtime.telemetry.recent_logs import RecentLogs
from headrace.sidecar.reactive.client import BackendClient
from headrace_dialects.light4j.chaos import Chaos
from headrace_dialects.light4j.chaos_routes import ChaosEndpoints
from headrace_dialects.light4j.light_sections import LightSections
from headrace_dialects.light4j.pass_through import PassThrough


def administration(config: HeadraceConfig | None = None, **reloads: Any) -> AdministrationEndpoints:
    """Return the administration of a process without functions; its end has no effect."""
    config = config or HeadraceConfig()
    modules = {name: Reload("does it", reload) for name, reload in reloads.items()}
    mask = SecretMask(config)
    return AdministrationEndpoints(lambda: config, RecentLogs(), Modules(lambda: modules), lambda: None, mask)


def assaults(config: HeadraceConfig) -> ChaosEndpoints:
    """Return the endpoints of assaults, which disturb nothing."""
    chaos = Chaos(SystemClock(), lambda disturbance: None)
    return ChaosEndpoints(lambda: config, chaos, pass_through(config))


def pass_through(config: HeadraceConfig) -> PassThrough:
    """Return what sends requests on to the backends of a configuration."""
    return PassThrough(config.section(LightSections).admin.pass_through, BackendClient)

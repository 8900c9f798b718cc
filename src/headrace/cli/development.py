"""What `headrace run --dev` adds: a Kafka if none responds, and a start without a file."""

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import click

from headrace.cli.cluster_options import load_settings
from headrace.cli.output import install_progress
from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.errors import EnvironmentProblem

_CONNECT_SECONDS = 1.0
_SECTIONS = ("kafka", "schema_registry")
_OTHER = "http://another.invalid:1"


def development_settings(file: Path | None) -> HeadraceConfig:
    """Return the settings of a development run, after starting a Kafka if none responds on this machine.

    Raises:
        ConfigError: The file is not valid.
        EnvironmentProblem: Kafka cannot be started.
    """
    settings = load_settings(file)
    servers = settings.kafka.bootstrap_servers.split(",")
    if any(map(_responds, servers)) or not all(map(_is_local, servers)):
        return _for_development(settings)
    try:
        from headrace.devcluster import DevCluster
    except ModuleNotFoundError as cause:
        raise EnvironmentProblem(
            f"no Kafka responds at {settings.kafka.bootstrap_servers}, and starting one needs the package "
            f"{cause.name}: pip install 'headrace[devcluster]'"
        ) from cause
    # Other commands read the same file, so a port in it is kept.
    port = _port(servers[0]) if _is_fixed(file, settings, "kafka", "bootstrap_servers", "KAFKA") else None
    url = settings.schema_registry.url
    is_fixed = _is_fixed(file, settings, "schema_registry", "url", "SCHEMA_REGISTRY_URL")
    registry_port = urlsplit(url).port if is_fixed and _is_local(urlsplit(url).netloc) else None
    with install_progress() as progress:
        found = DevCluster().up(port=port, registry_port=registry_port, progress=progress)
    click.echo(f"started Kafka at {found['kafka']['bootstrap_servers']}; to stop it: headrace dev down", err=True)
    return _for_development(load_settings(file))


def _for_development(settings: HeadraceConfig) -> HeadraceConfig:
    return settings.model_copy(update={"functions_reload": True})


def _is_fixed(file: Path | None, settings: HeadraceConfig, section: str, key: str, variable: str) -> bool:
    """Return whether a file or the environment sets an address, rather than the dev cluster of the folder."""
    if variable in os.environ or key not in getattr(settings, section).model_fields_set:
        return variable in os.environ
    other = load_config(file, {**os.environ, variable: _OTHER}, _SECTIONS)
    return str(getattr(getattr(other, section), key)) != _OTHER


def _port(server: str) -> int:
    return int(server.rpartition(":")[2])


def _is_local(server: str) -> bool:
    host = server.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _responds(server: str) -> bool:
    host, _, port = server.strip().rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True

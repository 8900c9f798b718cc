"""What `headrace run --dev` adds: a Kafka if none responds, the topics that are missing, a start without a file."""

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import click

from headrace.cli.cluster_options import load_settings
from headrace.cli.output import install_progress
from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.errors import HeadraceError
from headrace.extras import missing_of, require
from headrace.kafka import Admin

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
    if not all(map(_is_local, servers)):
        return _for_development(settings)
    if not any(map(_responds, servers)):
        _start_kafka(file, settings, servers)
        settings = load_settings(file)
    asyncio.run(_make_topics(settings))
    return _for_development(settings)


def _for_development(settings: HeadraceConfig) -> HeadraceConfig:
    """Return the settings with what a development run adds: reload, and the console where its library is installed."""
    added: dict[str, object] = {"functions_reload": True}
    if not missing_of("console"):
        from headrace_console.console_sections import ConsoleConfig, ConsoleSections

        if settings.section(ConsoleSections).console is None:
            added["console"] = ConsoleConfig(port=0)
    return settings.model_copy(update=added)


def _start_kafka(file: Path | None, settings: HeadraceConfig, servers: Sequence[str]) -> None:
    require("devkit", f"no Kafka responds at {settings.kafka.bootstrap_servers}, and starting one")
    from headrace_devkit.dev_command import report_late
    from headrace_devkit.devcluster import DevCluster

    # Other commands read the same file, so a port in it is kept.
    port = _port(servers[0]) if _is_fixed(file, settings, "kafka", "bootstrap_servers", "KAFKA") else None
    url = settings.schema_registry.url
    is_fixed = _is_fixed(file, settings, "schema_registry", "url", "SCHEMA_REGISTRY_URL")
    registry_port = urlsplit(url).port if is_fixed and _is_local(urlsplit(url).netloc) else None
    with install_progress() as progress:
        cluster = DevCluster()
        found = cluster.up(port=port, registry_port=registry_port, progress=progress)
    report_late(cluster)
    click.echo(f"started Kafka at {found['kafka']['bootstrap_servers']}; to stop it: headrace dev down", err=True)


async def _make_topics(settings: HeadraceConfig) -> None:
    """Make the missing topics of this machine's Kafka that the files read, each with one partition."""
    from headrace.app.topic_requirements import topic_requirements

    needed = {
        topic
        for kafka, required in topic_requirements(settings)
        if kafka.model_dump() == settings.kafka.model_dump()
        for topic in required.topics
    }
    if not missing_of("pipelines"):
        needed |= _topics_of_pipelines(settings)
    admin = Admin(settings.kafka)
    try:
        for topic in sorted(topic for topic in needed if not topic.startswith("^")):
            if await admin.create_topic(topic):
                click.echo(f"created topic {topic} with 1 partition", err=True)
    except HeadraceError as problem:  # the run names what it misses, and waits for it
        click.echo(f"no topics were created: {problem.description}", err=True)


def _topics_of_pipelines(settings: HeadraceConfig) -> set[str]:
    from headrace_pipelines.load import load_pipelines
    from headrace_pipelines.pipeline_sections import PipelineSections

    pipelines = load_pipelines(settings.section(PipelineSections).pipelines)
    here = [pipeline for pipeline in pipelines if pipeline.cluster(settings.kafka) is settings.kafka]
    return {topic for pipeline in here for source in pipeline.sources.values() for topic in source.topics}


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

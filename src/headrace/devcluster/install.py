"""What is done once per machine to have Kafka: jars, bootstrap checkpoint, class-data archive."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import NamedTuple

from headrace.devcluster import wire
from headrace.devcluster.archive import SMALL_JVM, archive_flags, prepare_archive
from headrace.devcluster.ports import free_ports
from headrace.devcluster.properties import NodePorts, format_data_folder, new_id, server_properties
from headrace.devcluster.server import Server
from headrace.errors import EnvironmentProblem
from headrace.jvm import Java, Progress, ensure_artifacts, find_java
from headrace.jvm.java import run_java

_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")


class KafkaInstall(NamedTuple):
    """Kafka on this machine."""

    java: Java
    folder: Path

    @property
    def checkpoint(self) -> Path:
        """Bootstrap checkpoint of this Kafka version, to be copied into new data folders."""
        return self.folder / "bootstrap.checkpoint"

    def command(self, properties: Path, flags: list[str] | None = None) -> list[str]:
        """Return the command that runs a broker; `flags` take the place of those that use the archive."""
        return [
            *(str(self.java.executable), "-Xmx256m", *SMALL_JVM),
            *(archive_flags(self.folder, self.java) if flags is None else flags),
            f"-Dlog4j2.configurationFile={_LOG_CONFIG}",
            *("-cp", f"{self.folder}/*", "kafka.Kafka", str(properties)),
        ]


def install_kafka(progress: Progress | None = None) -> KafkaInstall:
    """Return Kafka, installing what is missing.

    Raises:
        EnvironmentProblem: No fitting Java, or an artifact cannot be had.
    """
    install = KafkaInstall(find_java(17), ensure_artifacts("kafka", progress))
    prepare_archive(install.folder, install.java, functools.partial(_exercise, install), progress)
    return install


def _exercise(install: KafkaInstall, flags: list[str], scratch: Path) -> None:
    ports = {1: NodePorts(*free_ports(2))}
    properties = scratch / "server.properties"
    properties.write_text(server_properties(1, ports, scratch / "data"))
    if not install.checkpoint.exists():
        _make_checkpoint(install, properties, scratch / "data")
    format_data_folder(scratch / "data", new_id(), 1, install.checkpoint)
    server = Server("The broker that prepares quick starts", scratch / "broker.log")
    server.start(install.command(properties, flags), detached=False)
    try:
        server.wait_until(lambda: 1 in wire.metadata(ports[1].broker).brokers, limit_seconds=60)
        wire.create_topic(ports[1].broker, "prepare", 1, 1, {})
    finally:
        server.stop(limit_seconds=60)


def _make_checkpoint(install: KafkaInstall, properties: Path, data: Path) -> None:
    arguments = [*SMALL_JVM, "-cp", f"{install.folder}/*", "kafka.tools.StorageTool", "format", "-t", new_id()]
    code, output = run_java(install.java.executable, [*arguments, "-c", str(properties)], limit_seconds=60)
    if code != 0:
        raise EnvironmentProblem(f"Kafka's storage tool failed with exit code {code}:\n{output[-1000:]}")
    draft = install.checkpoint.with_suffix(".draft")
    shutil.copyfile(data / "bootstrap.checkpoint", draft)
    draft.replace(install.checkpoint)
    shutil.rmtree(data)

"""What is done once per machine: Kafka's jars, its bootstrap checkpoint, its class-data archive."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.devcluster import wire
from headrace.devcluster.ports import free_ports
from headrace.devcluster.properties import LOG_CONFIG, NodePorts, format_data_folder, new_id, server_properties
from headrace.devcluster.server import Server
from headrace.errors import EnvironmentProblem
from headrace.jvm import Java, Progress, ensure_artifacts, find_java
from headrace.jvm.cache import file_lock
from headrace.jvm.java import run_java

# Measured for a small broker: C1 and the serial collector halve memory and start-up, the rest is housekeeping.
SMALL_JVM = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-XX:-UsePerfData",
    "-Xss512k",
    "-Djava.awt.headless=true",
)
_NO_ARCHIVE_NOISE = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


@dataclass(frozen=True)
class KafkaInstall:
    """Kafka on this machine."""

    java: Java
    folder: Path

    @property
    def checkpoint(self) -> Path:
        """Bootstrap checkpoint of this Kafka version, to be copied into new data folders."""
        return self.folder / "bootstrap.checkpoint"

    @property
    def archive(self) -> Path:
        """Class-data archive for this Java build; empty where this Java cannot make one."""
        return self.folder / f"classes-{self.java.build}.jsa"

    def command(self, properties: Path, *extra: str) -> list[str]:
        """Return the command that runs a broker."""
        return [
            str(self.java.executable),
            "-Xmx256m",
            "-Xms32m",
            *SMALL_JVM,
            *(extra or archive_flags(self.archive)),
            f"-Dlog4j2.configurationFile={LOG_CONFIG}",
            "-cp",
            f"{self.folder}/*",
            "kafka.Kafka",
            str(properties),
        ]


def install_kafka(progress: Progress | None = None) -> KafkaInstall:
    """Return Kafka, installing what is missing.

    Raises:
        EnvironmentProblem: No fitting Java, or an artifact cannot be had.
    """
    install = KafkaInstall(find_java(17), ensure_artifacts("kafka", progress))
    if not (install.checkpoint.exists() and install.archive.exists()):
        with file_lock(install.folder.with_name("kafka-prepare.lock")), tempfile.TemporaryDirectory() as scratch:
            if not (install.checkpoint.exists() and install.archive.exists()):
                if progress:
                    progress("preparing Kafka for quick starts", 0, 0)
                _prepare(install, Path(scratch))
    return install


def archive_flags(archive: Path) -> list[str]:
    """Return the flags that use a class-data archive, none if there is none."""
    usable = archive.exists() and archive.stat().st_size > 0
    return [f"-XX:SharedArchiveFile={archive}", *_NO_ARCHIVE_NOISE] if usable else []


def archiving_flags(draft: Path) -> list[str]:
    """Return the flags that write a class-data archive when the JVM ends."""
    return [f"-XX:ArchiveClassesAtExit={draft}", *_NO_ARCHIVE_NOISE]


def keep_archive(draft: Path, archive: Path) -> None:
    """Put a new archive in place; an empty one if this Java made none, so that nobody tries again."""
    draft.touch()
    shutil.move(draft, archive.with_suffix(".draft"))
    archive.with_suffix(".draft").replace(archive)


def _prepare(install: KafkaInstall, scratch: Path) -> None:
    ports = {1: NodePorts(*free_ports(2))}
    properties = scratch / "server.properties"
    properties.write_text(server_properties(1, ports, scratch / "data"))
    if not install.checkpoint.exists():
        _make_checkpoint(install, properties, scratch / "data")
    shutil.rmtree(scratch / "data", ignore_errors=True)
    format_data_folder(scratch / "data", new_id(), 1, install.checkpoint)
    draft = scratch / "classes.jsa"
    server = Server("The broker that prepares quick starts", scratch / "broker.log")
    server.start(install.command(properties, *archiving_flags(draft)), detached=False)
    try:
        server.wait_until(lambda: 1 in wire.metadata(ports[1].broker).brokers, limit_seconds=60)
        wire.create_topic(ports[1].broker, "prepare", 1, 1, {})
    finally:
        server.stop(limit_seconds=60)
    keep_archive(draft, install.archive)


def _make_checkpoint(install: KafkaInstall, properties: Path, data: Path) -> None:
    arguments = [*SMALL_JVM, "-cp", f"{install.folder}/*", "kafka.tools.StorageTool", "format", "-t", new_id()]
    code, output = run_java(install.java.executable, [*arguments, "-c", str(properties)], limit_seconds=60)
    if code != 0:
        raise EnvironmentProblem(f"Kafka's storage tool failed with exit code {code}:\n{output[-1000:]}")
    shutil.copyfile(data / "bootstrap.checkpoint", install.checkpoint)

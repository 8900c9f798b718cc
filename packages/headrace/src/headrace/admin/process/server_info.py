"""What a process is: its version, machine, libraries, and settings without secrets."""

import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.config.explain import masked
from headrace.config.model import HeadraceConfig
from headrace.kafka import librdkafka_version
from headrace.runtime.memory import memory_bytes

_LIBRARIES = ("confluent-kafka", "pyspark", "duckdb", "aiohttp", "httptools", "pydantic", "msgspec")


class Deployment(msgspec.Struct, rename="camel"):
    """The program."""

    service_id: str
    """`audit.service_id`."""
    version: str
    started_at: str


class Environment(msgspec.Struct, rename="camel"):
    """The machine and the libraries."""

    host: str
    pid: int
    system: str
    python: str
    libraries: Mapping[str, str]
    """Versions of those that are installed, among them librdkafka and PySpark."""
    processors: int
    memory_bytes: int
    """Resident memory of this process."""


class ServerInfo(msgspec.Struct):
    """A process, without secrets."""

    deployment: Deployment
    environment: Environment
    component: Mapping[str, Any]
    """The effective settings of each section."""


_STARTED_AT = time.gmtime()


def server_info(config: HeadraceConfig) -> ServerInfo:
    """Return what this process is. It reads files, so call it in a thread."""
    libraries = {name: version for name in _LIBRARIES if (version := _version_of(name))}
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", _STARTED_AT)
    return ServerInfo(
        Deployment(config.audit.service_id, importlib.metadata.version("headrace"), started_at),
        Environment(
            host=socket.gethostname(),
            pid=os.getpid(),
            system=platform.platform(),
            python=platform.python_version(),
            libraries={"librdkafka": librdkafka_version(), **libraries},
            processors=os.cpu_count() or 1,
            memory_bytes=memory_bytes(),
        ),
        masked(config),
    )


def _version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""

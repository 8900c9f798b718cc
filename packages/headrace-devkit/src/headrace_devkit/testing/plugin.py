"""The pytest plugin: real Kafka in about a second, without containers.

Installed with Headrace; name a fixture and it is there. Everything starts on first use.
"""

import asyncio
import contextlib
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headrace.errors import EnvironmentProblem
from headrace_devkit.devcluster import Cluster, HeadraceProcess, RecordingBackend, Registry
from headrace_devkit.devcluster.token_server import TokenServer
from headrace_devkit.testing.fixture_types import MakeTopic, SharedHeadrace, StartHeadrace
from headrace_devkit.testing.forked import ForkedHeadrace
from headrace_devkit.testing.pipelines import PipelineRows
from headrace_devkit.testing.proxy import FaultProxy
from headrace_devkit.testing.secured import SecuredCluster

AnyServers = TypeVar("AnyServers", Cluster, Registry, TokenServer)


@contextlib.contextmanager
def _failing_in_one_paragraph() -> Iterator[None]:
    try:
        yield
    except EnvironmentProblem as problem:
        pytest.fail(str(problem), pytrace=False)


def _run(servers: AnyServers) -> Iterator[AnyServers]:
    try:
        try:
            servers.start()
        except EnvironmentProblem:  # the whole session needs this start, so it has a second try
            servers.remove()
            with _failing_in_one_paragraph():
                servers.start()
        yield servers
    finally:
        servers.remove()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one broker, shared by the session: `kafka.bootstrap_servers`."""
    yield from _run(Cluster(tmp_path_factory.mktemp("kafka"), 1))


@pytest.fixture(scope="session")
def kafka_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three brokers, shared by the session, with `kill(n)`, `pause(n)`, `resume(n)`, `restart(n)`.

    A test that breaks a broker repairs it before it ends.
    """
    yield from _run(Cluster(tmp_path_factory.mktemp("kafka3"), 3, proxied=True))


@pytest.fixture(scope="session")
def kafka_secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    """A cluster of one broker with TLS, logins and access rules, and a token server, shared by the session.

    `kafka_secured.login(mechanism, user)` and `certificate(user)` return the section `kafka` of a headrace.yaml.
    """
    for cluster in _run(Cluster(tmp_path_factory.mktemp("secured"), 1, secured=True)):
        assert cluster.security
        for tokens in _run(TokenServer(tmp_path_factory.mktemp("tokens"), cluster.security)):
            yield SecuredCluster(cluster, cluster.security, tokens)


@pytest.fixture
def kafka_network(kafka_three: Cluster) -> Iterator[FaultProxy]:
    """A proxy to `kafka_three` that can be broken: `bootstrap_servers`, `cut()`, `silence()`, `hold()`, `heal()`."""
    proxy = FaultProxy(kafka_three.routes)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def topic(kafka: Cluster) -> MakeTopic:
    """Make topics with unique names on `kafka`: `topic(partitions=1, **configs) -> name`.

    Configuration names are written with underscores: `topic(3, retention_ms=1000)`.
    """
    unique = uuid.uuid4().hex[:8]
    numbers = itertools.count(1)

    def make(partitions: int = 1, **configs: object) -> str:
        name = f"test-{unique}-{next(numbers)}"
        kafka.create_topic(name, partitions, {key.replace("_", "."): str(value) for key, value in configs.items()})
        return name

    return make


@pytest.fixture(scope="session")
def schema_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A schema registry, shared by the session: `schema_registry.url`."""
    yield from _run(Registry(tmp_path_factory.mktemp("registry")))


@pytest.fixture(scope="session")
def pipeline_rows() -> Iterator[PipelineRows]:
    """Rows that a pipeline has for given rows, by one Spark session of the test session: see `PipelineRows`."""
    with _failing_in_one_paragraph(), asyncio.Runner() as runner, PipelineRows(runner) as rows:
        yield rows


@pytest.fixture
def backend() -> Iterator[RecordingBackend]:
    """A backend that records the pushed records and answers as `response` and `script` define."""
    backend = RecordingBackend()
    backend.start()
    yield backend
    backend.stop()


@contextlib.contextmanager
def _processes(folder: Path) -> Iterator[StartHeadrace]:
    started: list[HeadraceProcess] = []

    def start(config: Mapping[str, Any], *, wait: bool = True, env: Mapping[str, str] | None = None) -> HeadraceProcess:
        process = ForkedHeadrace(config, folder / f"headrace-{len(started)}", env)
        started.append(process)
        process.start()
        if wait:
            with _failing_in_one_paragraph():
                process.wait_ready()
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def headrace(tmp_path: Path) -> Iterator[StartHeadrace]:
    """Start Headrace processes: `headrace(config, wait=True, env=None) -> HeadraceProcess`; killed after the test."""
    with _processes(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def module_headrace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedHeadrace]:
    """The Headrace process that a module's tests share: `module_headrace(config) -> HeadraceProcess`, one a config.

    Each test uses topics and groups of its own.
    """
    shared: dict[str, HeadraceProcess] = {}
    with _processes(tmp_path_factory.mktemp("shared")) as start:

        def running(config: Mapping[str, Any]) -> HeadraceProcess:
            key = json.dumps(config, sort_keys=True)
            if key not in shared or shared[key].exit_code is not None:
                shared[key] = start(config)
            return shared[key]

        yield running

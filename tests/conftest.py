"""The two tiers, the groups of tests that share a worker, and what second tries cost."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from hypothesis import settings

from headrace.errors import EnvironmentProblem
from headrace_devkit.devcluster import ports
from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic, Registry
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster
from tests.shared_servers import SharedServers

# How long an example takes says nothing of whether it is right.
settings.register_profile("short", deadline=None)
settings.register_profile("all", deadline=None, max_examples=500)

# A JVM of a test ends before code that is compiled well has paid.
os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1"

# Whoever starts the tests in the background may have these ignored, and the programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TESTS = Path(__file__).parent
EARLY = ("spark-first", "spark-second", "kafka_secured", "kafka_three")
"""Groups in the order in which they begin: the longest first, so that none of them is alone at the end."""

SERVERS = pytest.StashKey[SharedServers]()
"""The servers that the workers of a run share; none in a run without workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--secured", action="store_true", help="Headrace reaches Kafka over TLS, with a login and ACLs")
    parser.addoption("--all", action="store_true", help="also run what only `make test-all` runs (tests/LONG.md)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("--all") else "short")
    worker = getattr(config, "workerinput", None)
    if worker:  # a port that one worker has seen free is given to no other one before its server listens
        ports._CANDIDATES = ports._CANDIDATES[int(worker["workerid"][2:]) :: worker["workercount"]]
    if config.getoption("numprocesses", None) and not worker:
        config.pluginmanager.register(Failures(config))
    if worker or config.getoption("numprocesses", None):
        folder = worker["servers"] if worker else tempfile.mkdtemp(prefix="headrace-tests-")
        config.stash[SERVERS] = SharedServers(Path(folder))


class Failures:
    """Shows each failure when it happens: a part of `make test-all` takes up to 40 minutes to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # for good: a first try is reported as a rerun
            terminal = self._config.get_terminal_writer()
            terminal.line()
            terminal.sep("-", f"{report.when} of {report.nodeid} failed")
            terminal.line(report.longreprtext)
            terminal.flush()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (servers := config.stash.get(SERVERS, None)) and not hasattr(config, "workerinput"):
        servers.stop()
        shutil.rmtree(servers.folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the servers of the run are."""
    node.workerinput["servers"] = str(node.config.stash[SERVERS].folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Start the servers of the run, if a test may need them."""
    if not all(name.startswith("tests/unit/") for name in ids):
        node.config.stash[SERVERS].start()


@pytest.hookimpl(tryfirst=True)  # before the plug-in that gives each group to one worker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if group := _group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
        if _level_of(item) != "unit":
            # A machine that is busy elsewhere can miss any deadline once. The summary says what each second try cost;
            # a test that fails twice is red.
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=_turn_of)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the three brokers behind their last test, as idle ones take a tenth of a processor."""
    if "kafka_three" in _fixtures(item) - _fixtures(nextitem) and "kafka_three" in item.funcargs:  # type: ignore[attr-defined]
        item.funcargs["kafka_three"].stop()  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests needed a second try and why, and how many seconds the first tries cost."""
    failed = terminalreporter.stats.get("rerun", [])
    terminalreporter.section("second tries")
    terminalreporter.line(f"{len(failed)} second tries; the first tries cost {sum(r.duration for r in failed):.0f} s")
    for report in failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.line(f"{report.duration:.0f} s {report.nodeid}: {crash.message[:500] if crash else ''}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own, which with the mark `uvloop` is uvloop's."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    make = uvloop.new_event_loop if pyfuncitem.get_closest_marker("uvloop") else None
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


def _level_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _group_of(item: pytest.Item) -> str:
    """Return the name of the tests that run one after the other in one worker; empty if the test stands alone."""
    level = _level_of(item)
    if level == "unit" or item.get_closest_marker("xdist_group"):
        return ""  # it stands alone, or names its group itself
    if "pipeline" in item.nodeid and item.get_closest_marker("heavy"):
        # Three drivers at a time take more processors and memory than a small machine has; two groups of equal length.
        is_second = level == "faults" or item.path.name == "test_pipeline_checkpoints.py"
        return "spark-second" if is_second else "spark-first"
    if "kafka_three" in _fixtures(item):
        return "kafka_three"  # they break the brokers they share
    if _is_secured(item):
        return "kafka_secured"  # they share the cluster with TLS
    return "" if level == "faults" else item.path.name  # the tests of a module share a process


def _turn_of(item: pytest.Item) -> int:
    """Return when a test begins: groups that take long, then tests with processes, then the rest."""
    mark = item.get_closest_marker("xdist_group")
    group = mark.args[0] if mark else ""
    if group in EARLY:
        return EARLY.index(group)
    return len(EARLY) + (_level_of(item) == "unit")


def _is_secured(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("secured")) or "kafka_secured" in _fixtures(item)


def _fixtures(item: pytest.Item | None) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def shared_servers(request: pytest.FixtureRequest) -> SharedServers | None:
    """The servers of the run, which respond; None in a run without workers, where the plug-in's fixtures start them."""
    servers = request.config.stash.get(SERVERS, None)
    if servers:
        try:
            servers.wait_ready()
        except EnvironmentProblem as problem:
            pytest.fail(str(problem), pytrace=False)
    return servers


@pytest.fixture(scope="session")
def schema_registry(request: pytest.FixtureRequest, shared_servers: SharedServers | None) -> Registry:
    """The schema registry of the run."""
    return shared_servers.registry if shared_servers else request.getfixturevalue("schema_registry")


@pytest.fixture(scope="module")
def kafka(request: pytest.FixtureRequest, shared_servers: SharedServers | None) -> Iterator[Cluster]:
    """The cluster of most tests.

    In modules marked `secured`, and everywhere with `--secured`, the product logs in over TLS; the tests' own clients
    do not.
    """
    if not (request.config.getoption("--secured") or request.node.get_closest_marker("secured")):
        plain: Cluster = shared_servers.cluster if shared_servers else request.getfixturevalue("kafka")
        yield plain
        return
    secured: SecuredCluster = request.getfixturevalue("kafka_secured")
    HeadraceProcess.logins[secured.cluster.bootstrap_servers] = secured.login()
    yield secured.cluster
    del HeadraceProcess.logins[secured.cluster.bootstrap_servers]


@pytest.fixture(scope="module")
def topics_of_module(kafka: Cluster) -> Iterator[list[str]]:
    """The names of topics that the module has made.

    They are deleted behind it, with what the product has named after them: each look at the offsets of a group lists
    all topics of the cluster.
    """
    names: list[str] = []
    yield names
    client = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    found = [name for name in client.list_topics(timeout=60).topics if any(made in name for made in names)]
    for deleted in client.delete_topics(found).values() if found else ():
        with contextlib.suppress(KafkaException):  # a test has deleted it meanwhile
            deleted.result(60)


@pytest.fixture
def topic(topic: MakeTopic, topics_of_module: list[str]) -> MakeTopic:
    """Make topics as the plug-in does: `topic(partitions=1, **configs) -> name`."""

    def make(partitions: int = 1, **configs: object) -> str:
        topics_of_module.append(topic(partitions, **configs))
        return topics_of_module[-1]

    return make


@pytest.fixture
def site(kafka: Cluster, tmp_path: Path) -> Scenario:
    """The broker and the running process as a user sees them."""
    return Scenario(kafka.bootstrap_servers, tmp_path)


@pytest.fixture(autouse=True)
def whole_brokers(request: pytest.FixtureRequest) -> None:
    """Mend what a failed test has left broken in the cluster that is shared."""
    if "kafka_three" in request.fixturenames:
        brokers = request.getfixturevalue("kafka_three")
        for number in (1, 2, 3):
            brokers.resume(number)
        brokers.start()
        brokers.wait_in_sync()

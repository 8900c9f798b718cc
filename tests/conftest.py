"""The options `--long` (tests/LONG.md) and `--secured`; real processes get one more try, and brokers that are whole."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

from headrace.testing import Cluster, HeadraceProcess
from headrace.testing.secured import SecuredCluster

# How long an example takes says nothing of whether it is right.
settings.register_profile("short", deadline=None)
settings.register_profile("long", deadline=None, max_examples=500)

# A JVM of a test ends before code that is compiled well has paid.
os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1"

# Whoever starts the tests in the background may have these ignored, and the programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--secured", action="store_true", help="Headrace reaches Kafka over TLS, with a login and ACLs")
    parser.addoption("--long", action="store_true", help="also run the long tests (tests/LONG.md)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "short")


@pytest.hookimpl(tryfirst=True)  # before the plug-in that gives each group to one worker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="a long test: run it with --long")
    unit = Path(__file__).parent / "unit"
    for item in items:
        if group := _group_of(item, unit):
            item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(skip)
        if unit not in item.path.parents:
            # A machine that is busy elsewhere can miss any deadline once. The summary shows each with its first
            # failure, and each is a defect to look into; one that fails twice is red.
            item.add_marker(pytest.mark.flaky(reruns=1))


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


def _group_of(item: pytest.Item, unit: Path) -> str:
    """Return the name of the tests that run one after the other in one worker; empty if the test stands alone."""
    if item.get_closest_marker("xdist_group"):
        return ""  # it names its group itself
    if "pipeline" in item.nodeid and unit not in item.path.parents:
        return "spark"  # three drivers at a time take more processors and memory than a small machine has
    if "kafka_three" in getattr(item, "fixturenames", ()):
        return "three-brokers"  # they break the brokers they share
    if unit in item.path.parents or item.path.parent.name == "faults":
        return ""
    return item.path.name  # its tests share a process


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Cluster:
    """The cluster of most tests. With `--secured`, the product logs in over TLS; the tests' own clients do not."""
    if not request.config.getoption("--secured"):
        plain: Cluster = request.getfixturevalue("kafka")
        return plain
    secured: SecuredCluster = request.getfixturevalue("kafka_secured")
    HeadraceProcess.logins[secured.cluster.bootstrap_servers] = secured.login()
    return secured.cluster


@pytest.fixture(autouse=True)
def whole_brokers(request: pytest.FixtureRequest) -> None:
    """Mend what a failed test has left broken in the cluster that is shared."""
    if "kafka_three" in request.fixturenames:
        brokers = request.getfixturevalue("kafka_three")
        for number in (1, 2, 3):
            brokers.resume(number)
        brokers.start()
        brokers.wait_in_sync()

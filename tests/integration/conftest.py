"""The fixtures of tests on running processes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import (
    HeadraceProcess,
    MakeTopic,
    PlannedResponse,
    RecordingBackend,
    SharedHeadrace,
    StartHeadrace,
)
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send
from tests.function_calls import FunctionCalls, function_file
from tests.function_workers import Running, running_function, write_function

__all__ = ["write_function"]
QUICK = {"attempts": 3, "first_delay_seconds": 0.05, "max_delay_seconds": 0.2}


@pytest.fixture
def running() -> Callable[..., AbstractAsyncContextManager[Running]]:
    """A factory of started functions whose workers are processes, stopped at the end of the block."""
    return running_function


@pytest.fixture
def function(site: Scenario, headrace: StartHeadrace, tmp_path: Path) -> Callable[..., HeadraceProcess]:
    """Run a handler on a topic, in the group of its name and `-work`: `function(source, code, **attributes)`.

    `spec` and `trigger` are further keys of the file, `more` are parts of headrace.yaml.
    """

    def start(
        source: str,
        code: str,
        *,
        spec: Any = None,
        trigger: Any = None,
        more: Any = None,
        wait: bool = True,
        **attributes: Any,
    ) -> HeadraceProcess:
        known = {"topics": [source], "consumerGroup": f"{source}-work", **attributes}
        made = {"kind": "kafka-cluster", **(trigger or {}), "attributes": known}
        config = {
            **site.config,
            **(more or {}),
            "functions": [function_file(tmp_path, code, {"in": made}, **spec or {})],
        }
        return headrace(config, wait=wait)  # type: ignore[no-any-return]

    return start


@pytest.fixture
def calls(site: Scenario, headrace: StartHeadrace, topic: MakeTopic, tmp_path: Path) -> Callable[[int], FunctionCalls]:
    """Make a function that writes its calls, on a topic of this many partitions."""
    return lambda partitions: FunctionCalls(site, headrace, tmp_path, topic(partitions))


@pytest.fixture(scope="module")
def registrations() -> dict[str, Any]:
    """The sections of a process where the tests of a module register consumers, and the port of their backends."""
    port = free_ports(1)[0]
    table = f"_headrace-control-{uuid.uuid4().hex[:12]}"
    return {"control": {"topic": table}, "registrations": {"backends": [f"http://127.0.0.1:{port}/"]}}


@pytest.fixture
def backend(registrations: dict[str, Any]) -> Iterator[RecordingBackend]:
    """A backend of the test, where the process of its module may push to."""
    [url] = registrations["registrations"]["backends"]
    backend = RecordingBackend(int(url.rstrip("/").rpartition(":")[2]))
    backend.start()
    yield backend
    backend.stop()


@pytest.fixture
def push(
    site: Scenario,
    backend: RecordingBackend,
    headrace: StartHeadrace,
    module_headrace: SharedHeadrace,
    registrations: dict[str, Any],
) -> Iterator[Callable[..., HeadraceProcess]]:
    """Push a topic to the backend: `push(topic, **settings of the consumer)`, by the process of the module.

    The consumer has the name of its topic. With `alone=True`, and whenever `more` has other sections of the file, it
    has a process of its own.
    """
    registered: list[str] = []

    def start(
        topic: str, *, alone: bool = False, wait: bool = True, more: Any = None, env: Any = None, **settings: Any
    ) -> HeadraceProcess:
        consumer = {
            "topics": [topic],
            "group": f"{topic}-push",
            **settings,
            "retry": {**QUICK, **settings.get("retry", {})},
            "backend": {"url": backend.url, **settings.get("backend", {})},
        }
        if alone or more or env or not wait:
            config = {**site.config, **(more or {}), "reactive_consumers": {topic: consumer}}
            return headrace(config, wait=wait, env=env)  # type: ignore[no-any-return]
        process: HeadraceProcess = module_headrace({**site.config, **registrations})
        response = send("PUT", f"{process.url}/reactive-consumers/{topic}", consumer)
        assert response.status == 201, response
        registered.append(f"{process.url}/reactive-consumers/{topic}")
        site.wait_until(lambda: send("GET", registered[-1]).body["state"] == "running", f"{topic} to be consumed")
        return process

    yield start
    if registered:
        backend.stop()  # ends what hangs
        backend.response = PlannedResponse()
        backend.start()
    for place in registered:
        assert send("DELETE", place).status == 200
        url, _, name = place.rpartition("/reactive-consumers/")
        site.wait_until(
            lambda url=url, name=name: send("GET", f"{url}/adm/reactive-consumers/{name}").status == 404, "its end"
        )

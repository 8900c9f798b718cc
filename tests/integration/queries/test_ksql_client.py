"""The `ksql` client of the package index against a running Headrace: what works, and what its limits are."""

from __future__ import annotations

import json
import secrets
import subprocess
import venv
from pathlib import Path

import pytest

from headrace_devkit.testing import Cluster, HeadraceProcess, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send

PROGRAM = Path(__file__).with_name("ksql_client_program.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python of its own that has the client."""
    folder = tmp_path_factory.mktemp("ksql")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
    for packages in (["setuptools<70", "wheel"], ["--no-build-isolation", "ksql==0.10.2", "requests", "hyper==0.7.0"]):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"the client cannot be installed here: {done.stderr[-300:]}")
    return str(folder / "bin/python")


@pytest.fixture
def process(site: Scenario, kafka: Cluster, headrace: StartHeadrace) -> HeadraceProcess:
    """A process with a table of two rows."""
    topic = f"ksql-{secrets.token_hex(4)}"
    kafka.create_topic(topic, 1)
    process: HeadraceProcess = headrace(
        {**site.config, "tables": {"stock": {"topic": topic, "schema": "item STRING, n BIGINT, price DECIMAL(6, 2)"}}}
    )
    site.write_json(topic, {"item": "tea", "n": 1, "price": 1.5}, {"item": "rice", "n": 2, "price": 2.5})
    site.wait_until(lambda: send("GET", f"{process.url}/tables").body["tables"][0]["rows"] == 2, "two rows")
    return process


@pytest.mark.long
def test_the_client_of_the_package_index_works_at_query(process: HeadraceProcess, python: str) -> None:
    """Rows as objects and as lines, a silent query that ends, a query that is closed, and the sentence of an error."""
    done = subprocess.run(
        [python, "-W", "ignore", PROGRAM, process.url], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["pull"] == [{"ITEM": "tea", "N": 1, "PRICE": 1.5}, {"ITEM": "rice", "N": 2, "PRICE": 2.5}]
    assert found["push"] == [{"ITEM": "tea"}, {"ITEM": "rice"}]
    assert found["idle"] == []
    assert found["closed"] == [True, "Query Completed"]
    assert found["closed_again"] is False
    code, message = found["error"]
    assert (code, message[:40]) == (40001, "a push query sees each changed row alone")

"""Prepares a machine for pipelines: the jars of Spark's Kafka connector, and the class-data archive of its JVM."""

import asyncio
import contextlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import EnvironmentProblem
from headrace.runtime import Deadline, Service, SystemClock
from headrace_jvm import Progress
from headrace_pipelines import driver_protocol
from headrace_pipelines.connector import ConnectorSecurity
from headrace_pipelines.driver_process import DriverProcess, Toolchain, find_toolchain, require_spark
from headrace_pipelines.spec import PipelineSpec

_END_SECONDS = 120.0
# Typical work, so that its classes are in the archive: JSON of a topic, an aggregate with state, a streaming query.
_PIPELINE = {
    "name": "prepare",
    "sources": {"events": {"topic": "events", "schema": "name STRING, value INT"}},
    "views": {"loaded": {"python": f"{__name__}:with_clients", "reads": ["events"]}},
    "flows": {"sums": {"sql": "SELECT name, sum(value) AS n FROM loaded GROUP BY name", "sink": {"topic": "sums"}}},
}
_TASK = driver_protocol.DriverTask(
    kind="test", given={"events": [[{"name": "a", "value": 1}]]}, expect={"sums": None}, streaming=True
)


def prepare(progress: Progress | None = None) -> None:
    """Fetch the jars and make the archive, unless they are there. It takes about half a minute, once.

    Raises:
        EnvironmentProblem: pyspark, Java or a jar is missing, or Spark does not start.
    """
    require_spark()
    toolchain = asyncio.run(find_toolchain(progress))
    assert toolchain.archive
    toolchain.archive.make(lambda flags, scratch: asyncio.run(_exercise(toolchain, flags, scratch)), progress)


def with_clients(rows: Any) -> Any:
    """Return the rows; loads the classes of the connector and of Kafka's client, because it has no broker to use."""
    spark = rows.sparkSession
    loader = spark._jvm.Thread.currentThread().getContextClassLoader()
    for jar in spark.conf.get("spark.driver.extraClassPath").split(os.pathsep):
        for name in zipfile.ZipFile(jar).namelist():
            with contextlib.suppress(Exception):  # not a class, or one that needs another library
                spark._jvm.Class.forName(name.removesuffix(".class").replace("/", "."), False, loader)
    return rows


async def _exercise(toolchain: Toolchain, flags: Sequence[str], scratch: Path) -> None:
    spec, owner = PipelineSpec.model_validate(_PIPELINE), Service("preparation")
    plan = driver_protocol.DriverPlan(
        spec=spec,
        bootstrap_servers="localhost:1",
        folder=scratch,
        jars=toolchain.jars,
        java_flags=(*flags,),
        task=_TASK,
    )
    driver = await DriverProcess.start(owner, plan, toolchain, ConnectorSecurity({}, {}, frozenset()))
    response: driver_protocol.DriverEvent | None = None
    async for event in driver.events():
        if isinstance(event, driver_protocol.TaskResult | driver_protocol.Failed):
            response = event
            break
    await driver.stop(Deadline(SystemClock(), _END_SECONDS))
    await owner.stop()
    if not isinstance(response, driver_protocol.TaskResult):
        reason = response.text if isinstance(response, driver_protocol.Failed) else driver.last_output()
        raise EnvironmentProblem(f"Spark failed to run on this machine: {reason}")
